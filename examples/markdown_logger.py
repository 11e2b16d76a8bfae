"""Your own logger: ``consumer --log examples/markdown_logger.py:MarkdownLogger -o MarkdownLogger.digits=2``."""

from offloop.consumers import LoggerDestination


class MarkdownLogger(LoggerDestination):
    """Prints logged values as a Markdown table."""

    def __init__(self, digits: int = 4):
        self.digits = digits

    def open(self, context):
        print(f"| step of {context.run_name} | metric | value |\n| --: | --- | --: |")

    def log_rows(self, rows, state):
        for row in rows:
            for name, value in row.metrics.items():
                print(f"| {row.step} | {name} | {value:.{self.digits}g} |")

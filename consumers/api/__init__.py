"""What callbacks and loggers are written against: ``Callback``, ``Logger``, ``LoggerDestination``, images.

Begin with ``callback``."""

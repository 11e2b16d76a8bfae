"""What callbacks and loggers are written against: ``Callback``, ``Logger``, ``LoggerDestination``, images.

May import: bus.protocol. Begin with ``callback``.
"""

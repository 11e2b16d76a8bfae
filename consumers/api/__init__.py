"""What callbacks and loggers are written against: ``Callback``, ``Logger``, ``LoggerDestination``, images.

May import: ``bus``'s types and protocol. Begin with ``callback``.
"""

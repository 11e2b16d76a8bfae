"""Takes streams through callbacks: session, dispatcher, workers, commits, state that is kept.

May import: delivery, api. Begin with ``runner``, then ``dispatcher``.
"""

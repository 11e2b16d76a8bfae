"""Takes streams through callbacks: session, dispatcher, workers, commits, state that is kept.

Begin with ``runner``, then ``dispatcher``."""

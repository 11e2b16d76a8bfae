"""Takes streams through callbacks: session, dispatcher, workers, commits, state that is kept.

May import: bus.jetstream, bus.net, bus.protocol, bus.recording, bus.replay, bus.runs, bus.subscriber, api, delivery.
Begin with ``runner``, then ``dispatcher``.
"""

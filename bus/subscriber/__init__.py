"""Reads a run's events in order, live and recorded, from a folder or from NATS; sends commands.

May import: jetstream, net, protocol, recording, runs, tensors. Begin with ``subscriber``.
"""

from typing import TYPE_CHECKING

from offloop.bus.lazy import lazy_exports

if TYPE_CHECKING:
    from offloop.bus.subscriber.subscriber import AsyncSubscriber, Subscriber

__all__ = ["AsyncSubscriber", "Subscriber"]

__getattr__, __dir__ = lazy_exports(__name__, {"offloop.bus.subscriber.subscriber": __all__})

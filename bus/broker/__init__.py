"""Records and forwards the events of a run, and answers publishers and consumers.

May import: index, net, protocol, recording, runs, tensors. Begin with ``broker``, then ``run`` and ``rank``; ``python
-m offloop.bus.broker`` serves one run.
"""

from typing import TYPE_CHECKING

from offloop.bus.lazy import lazy_exports

if TYPE_CHECKING:
    from offloop.bus.broker.broker import Broker
    from offloop.bus.broker.service import BrokerStatistics

__all__ = ["Broker", "BrokerStatistics"]

__getattr__, __dir__ = lazy_exports(
    __name__, {"offloop.bus.broker.broker": ["Broker"], "offloop.bus.broker.service": ["BrokerStatistics"]}
)

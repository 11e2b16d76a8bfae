"""Records and forwards the events of runs, and answers publishers and consumers.

May import: index, net, protocol, recording, runs, tensors. Begin with ``broker``, then ``run`` and ``rank``;
``python -m bus.broker`` serves one run.
"""

from typing import TYPE_CHECKING

from bus.lazy import lazy_exports

if TYPE_CHECKING:
    from bus.broker.broker import Broker
    from bus.broker.runs import BrokerStatistics

__all__ = ["Broker", "BrokerStatistics"]

__getattr__, __dir__ = lazy_exports(
    __name__, {"bus.broker.broker": ["Broker"], "bus.broker.runs": ["BrokerStatistics"]}
)

"""Plays a recording as if it were live: in the process, or served to other processes.

May import: protocol, publisher, recording, runs. Begin with ``replay``.
"""

from typing import TYPE_CHECKING

from offloop.bus.lazy import lazy_exports

if TYPE_CHECKING:
    from offloop.bus.replay.replay import Replay

__all__ = ["Replay"]

__getattr__, __dir__ = lazy_exports(__name__, {"offloop.bus.replay.replay": __all__})

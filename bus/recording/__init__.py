"""A run's recording, an MCAP file: its records, the writer, the scan of an unfinished file, the readers.

May import: protocol, runs. Begin with ``recording`` for reading and ``writer`` for writing.
"""

from typing import TYPE_CHECKING

from offloop.bus.lazy import lazy_exports

if TYPE_CHECKING:
    from offloop.bus.recording.recording import Recording

__all__ = ["Recording"]

__getattr__, __dir__ = lazy_exports(__name__, {"offloop.bus.recording.recording": __all__})

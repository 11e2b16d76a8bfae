"""Plays a recording as if it were live: in the process, or served to other processes.

Begin with ``replay``."""

from offloop.bus.replay.replay import Replay as Replay

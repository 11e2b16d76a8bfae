"""Replays of a recording as if it were live, in the process or served to others. Begin with ``replay``."""

from offloop.bus.replay.replay import Replay as Replay

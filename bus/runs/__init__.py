"""Directories of runs: what is written down about a run, its attempts, who holds it, how it ended.

May import: protocol. Begin with ``directory``.
"""

from typing import TYPE_CHECKING

from offloop.bus.lazy import lazy_exports

if TYPE_CHECKING:
    from offloop.bus.runs.directory import Attempt, RunInfo, find_run, list_runs, new_run_name, runs_dir

__all__ = ["Attempt", "RunInfo", "find_run", "list_runs", "new_run_name", "runs_dir"]

__getattr__, __dir__ = lazy_exports(__name__, {"offloop.bus.runs.directory": __all__})

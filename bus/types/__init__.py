"""Values without input or output: events, training time, intervals, demand, commands, what consumers report.

Begin with ``event`` and ``timestamp``."""

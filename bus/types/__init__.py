"""Values without input or output: events, training time, intervals, demand, commands, what consumers report.

May import: errors and printing. Begin with ``event`` and ``timestamp``.
"""

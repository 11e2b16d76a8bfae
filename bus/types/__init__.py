"""Values without input or output: events, training time, intervals, demand, commands. Begin with ``event``."""

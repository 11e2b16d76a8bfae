"""State, algorithms, and the engine that runs them at each event. Begin with ``state``, then ``engine``."""

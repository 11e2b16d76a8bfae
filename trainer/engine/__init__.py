"""State, algorithms, and the engine that runs them at each event. Start with ``state``, then ``engine``."""

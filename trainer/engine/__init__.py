"""State, algorithms, and the engine that runs them at each event.

May import: arguments, data, device. Begin with ``state``, then ``engine``.
"""

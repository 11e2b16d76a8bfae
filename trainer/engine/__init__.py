"""State, algorithms, and the engine that runs them at each event.

May import: data, device, arguments. Begin with ``state``, then ``engine``.
"""

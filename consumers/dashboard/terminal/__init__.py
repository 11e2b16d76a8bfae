"""The dashboard in a terminal, ``top``.

May import: view. Begin with ``top``, then ``frame``.
"""

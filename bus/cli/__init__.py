"""The command ``bus``, and what the three commands have in common.

May import everything in ``bus``. Begin with ``main``.
"""

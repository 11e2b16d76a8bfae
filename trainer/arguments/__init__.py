"""Checks of arguments, durations, and values as people write them; holds no state.

May import: ``bus``'s types and errors. Begin with ``checks``.
"""

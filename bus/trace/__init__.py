"""Writes phases of a training as a Chrome trace.

May import: types, protocol. Begin with ``writer``.
"""

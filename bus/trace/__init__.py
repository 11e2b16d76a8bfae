"""Writes phases of a training as a Chrome trace.

May import: protocol. Begin with ``writer``.
"""

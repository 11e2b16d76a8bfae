"""Writes phases of a training as a Chrome trace.

Begin with ``writer``.
"""

"""Tells people and programs when a rule about a metric holds.

May import: api. Begin with ``alert``.
"""

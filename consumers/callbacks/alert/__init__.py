"""Tells people and programs when a rule about a metric holds.

Begin with ``alert``.
"""

"""Exports the trained model for inference.

May import: api. Begin with ``export``.
"""

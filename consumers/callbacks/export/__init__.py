"""Exports the trained model for inference.

Begin with ``export``.
"""

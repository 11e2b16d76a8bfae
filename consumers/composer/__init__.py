"""Runs callbacks that were written for Composer.

May import: api. Begin with ``adapter``.
"""

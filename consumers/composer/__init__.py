"""Runs callbacks that were written for Composer.

May import: bus.protocol, api. Begin with ``adapter``.
"""

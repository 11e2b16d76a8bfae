"""Runs callbacks that were written for Composer.

May import: bus.protocol, adapters, api. Begin with ``adapter``.
"""

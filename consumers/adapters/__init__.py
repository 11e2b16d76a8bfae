"""Runs callbacks and loggers that were written for other frameworks.

May import: bus.protocol, api. Begin with ``adapter``.
"""

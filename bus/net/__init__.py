"""Sockets that listen, CURVE keys, who is allowed in.

May import: protocol. Begin with ``curve``.
"""

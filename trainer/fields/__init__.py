"""Fields that are computed while a consumer requests them.

May import: bus.protocol, arguments, checkpoints, device, engine. Begin with ``registry``; a new field is a function,
see ``field``.
"""

"""Fields that are computed while a consumer requests them.

May import: checkpoints, engine. Begin with ``registry``; a new field is a function, see ``field``.
"""

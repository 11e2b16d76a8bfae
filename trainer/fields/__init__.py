"""Fields that are computed while a consumer requests them.

Begin with ``registry``; a new field is a function, see ``field``."""

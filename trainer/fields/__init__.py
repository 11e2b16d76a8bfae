"""Fields that are computed while a consumer requests them. Start with ``registry``; ``field`` defines a field."""

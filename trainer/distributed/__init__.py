"""Several ranks: agreement, division of samples, sharded weights. Start with ``ranks``."""

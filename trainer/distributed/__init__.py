"""Several ranks: who they are, how samples are shared out, sharded weights. Begin with ``ranks``."""

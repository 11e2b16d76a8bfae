"""Several ranks: who they are, data parallel and sharded training, how samples are shared out. Begin with ``ranks``."""

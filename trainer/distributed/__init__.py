"""Several ranks: who they are, data parallel and sharded training, how samples are shared out.

May import: data, device. Begin with ``ranks``.
"""

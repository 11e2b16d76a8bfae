"""The names and files of checkpoints, for trainer and consumers; needs no torch.

May import: tensors. Begin with ``names``.
"""

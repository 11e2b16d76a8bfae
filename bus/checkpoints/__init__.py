"""What the trainer and consumers have to agree on about checkpoint files; needs no torch.

May import: tensors. Begin with ``names``.
"""

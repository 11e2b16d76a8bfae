"""Tensors as bytes: the image of a safetensors file, shared memory that holds one, its transfer in pieces.

Begin with ``view``."""

"""Tensors as bytes: safetensors images (see ``view``), in events or in shared memory."""

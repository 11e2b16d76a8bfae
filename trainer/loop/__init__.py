"""Epochs and batches, the training step, the forward pass, the progress bar. Start with ``loop``, then ``step``."""

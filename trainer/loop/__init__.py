"""The training loop: epochs and batches, the step, microbatches, the forward pass, the progress bar.

Begin with ``loop``, then ``step``."""

"""The training loop: epochs and batches, the step, microbatches, the forward pass, the progress bar.

May import: evaluation, control, engine, distributed, schedulers. Begin with ``loop``, then ``step``.
"""

"""The training loop: epochs and batches, the step, microbatches, the forward pass, the progress bar.

May import: arguments, control, data, device, distributed, engine, evaluation, schedulers. Begin with ``loop``, then
``step``.
"""

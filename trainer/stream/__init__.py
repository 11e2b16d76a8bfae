"""From events of the training to events of the stream: what is published, when, and to whom.

May import: bus.net, bus.protocol, bus.publisher, bus.runs, bus.tensors, arguments, checkpoints, control, data, device,
distributed, engine, fields, schedulers. Begin with ``publishing``.
"""

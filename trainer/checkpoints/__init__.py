"""Checkpoints: when one is saved, what it contains, its file, its folder.

May import: bus.checkpoints, bus.tensors, arguments, data, distributed, engine, evaluation. Begin with ``checkpoints``;
``file`` is the format.
"""

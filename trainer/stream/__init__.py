"""From events of the training to events of the stream: what is published, when, and to whom.

May import: fields, control, checkpoints. Begin with ``publishing``.
"""

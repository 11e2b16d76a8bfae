"""From events of the training to events of the stream: what is published, when, and to whom.

Begin with ``publishing``."""

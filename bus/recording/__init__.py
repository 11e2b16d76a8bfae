"""A run's recording, an MCAP file: its records, the writer, the cursor that reads it, the summary.

Begin with ``recording`` and ``reader`` for reading and ``writer`` for writing."""

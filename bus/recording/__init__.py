"""A run's recording, an MCAP file: its records, the writer, the scan of an unfinished file, the readers.

May import: protocol, runs. Begin with ``recording`` for reading and ``writer`` for writing.
"""

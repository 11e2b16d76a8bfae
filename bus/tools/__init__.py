"""What can be done with recordings: export, convert, diff, and import, which makes one of another tool's log.

A module each; import is ``imports``, which reads through ``logs``."""

"""What can be done with recordings: export, cut, merge, diff, recover, and import, which makes one of another tool's
log.

A module each; recover is ``recovery``, and import is ``imports``, which reads through ``logs``.
"""

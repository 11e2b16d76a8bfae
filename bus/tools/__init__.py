"""What can be done with recordings: export, cut, merge, diff, recover.

May import: recording, runs, trace. Each command has a module of its name.
"""

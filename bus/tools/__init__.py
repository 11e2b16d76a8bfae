"""What can be done with recordings: export, cut, merge, diff, recover.

May import: protocol, recording, runs, trace. A module each; recover is ``recovery``.
"""

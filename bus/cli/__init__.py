"""The command ``offloop``, and ``bus``, which is the same, and what the programs have in common.

May import: hosts, index, jetstream, net, plugins, protocol, recording, replay, runs, subscriber, tools. Begin
with ``main``.
"""

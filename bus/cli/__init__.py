"""The command ``bus``, and what the three commands have in common.

May import: broker, hosts, index, jetstream, net, plugins, protocol, recording, replay, runs, subscriber, tools. Begin
with ``main``.
"""

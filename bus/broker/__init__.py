"""Records and forwards the events of a run, and answers publishers and consumers.

May import: index, net, protocol, recording, runs, tensors. Begin with ``broker``, then ``run`` and ``rank``; ``python
-m offloop.bus.broker`` serves one run.
"""

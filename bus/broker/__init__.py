"""Records and forwards the events of a run, and answers publishers and consumers.

Begin with ``broker``, then ``run`` and ``rank``; ``python -m offloop.bus.broker`` serves one run."""

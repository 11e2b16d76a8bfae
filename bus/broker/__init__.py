"""The broker of a run: see ``broker``, then ``run`` and ``rank``. ``python -m offloop.bus.broker`` serves one run."""

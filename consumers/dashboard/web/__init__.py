"""The dashboard in a browser: the page of one or some runs, and that of all.

Begin with ``page`` and ``home`` for what is drawn and ``gate`` for who may see it."""

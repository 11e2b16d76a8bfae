"""The command ``offloop``, and ``bus``, which is the same, and what the programs have in common.

Begin with ``main``."""

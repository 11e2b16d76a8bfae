"""Run ``python -m offloop``."""

from offloop.commands import offloop

offloop()

"""A callback that is far too slow for the training that it watches."""

import time

from offloop.consumers import Callback


class Sleeper(Callback):
    """Sleeps 50 ms at the end of every batch."""

    def batch_end(self, state, logger):
        """Sleeps."""
        time.sleep(0.05)

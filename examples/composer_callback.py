"""A callback for MosaicML Composer, which runs unchanged in a consumer, with or without Composer.

consumer --callbacks examples/composer_callback.py:Milestones -o Milestones.interval=10ba
"""

import math

from composer import Callback, Event, Logger, State, Time
from composer.utils import dist


class Milestones(Callback):
    """Logs the exponential of the loss and the progress at an interval, and prints each evaluation."""

    def __init__(self, interval: str = "2ba"):
        self.interval = Time.from_timestring(interval)

    def run_event(self, event: Event, state: State, logger: Logger):
        if event == Event.BATCH_END and state.timestamp.get(self.interval.unit).value % self.interval.value == 0:
            logger.log_metrics(
                {
                    "loss/exp": math.exp(state.loss.item()),
                    "progress": state.get_elapsed_duration().value,
                    "samples_per_rank": int(state.timestamp.sample) // dist.get_world_size(),
                }
            )
        if event == Event.EVAL_END and dist.get_global_rank() == 0:
            for name, metric in state.eval_metrics[state.dataloader_label].items():
                print(
                    f"{name} of {state.dataloader_label}: {metric.compute().item():.3f} after {state.timestamp.epoch}"
                )

"""Callbacks that count, in a module that their own process imports quickly."""

from typing import Any

from offloop.consumers import Callback, Logger


def never(value: float, best: float) -> bool:
    """No value is better than the first one."""
    return False


class Counter(Callback):
    """Logs how many batches and evaluations there were."""

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.evaluations = 0

    def batch_end(self, state: Any, logger: Logger) -> None:
        self.batches.append(int(state.timestamp.batch))
        logger.log_metrics({"count": len(self.batches), "evaluations": self.evaluations})

    def eval_end(self, state: Any, logger: Logger) -> None:
        self.evaluations += 1

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches, "evaluations": self.evaluations}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batches, self.evaluations = list(state["batches"]), state["evaluations"]


class SlowCounter(Counter):
    """The same with a stream of its own, under other names."""

    background = True

    def batch_end(self, state: Any, logger: Logger) -> None:
        self.batches.append(int(state.timestamp.batch))
        logger.log_metrics({"slow_count": len(self.batches), "slow_evaluations": self.evaluations})

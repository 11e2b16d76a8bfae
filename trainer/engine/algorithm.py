"""What may change the training: code that runs inside the loop."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from offloop.bus.types.event import Event

if TYPE_CHECKING:
    from offloop.trainer.engine.engine import AlgorithmLogger
    from offloop.trainer.engine.state import State


class Algorithm(ABC):
    """A change to the training that is applied at certain events: it may read and write all of the state.

    The line to callbacks: a callback only looks, gets a copy of the state and runs in another process; an algorithm is
    part of the training, which waits for it and fails with it. Define both methods::

        class HalveTheRate(Algorithm):
            def match(self, event, state):
                return event is Event.EPOCH_END

            def apply(self, event, state, logger):
                for group in state.optimizers[0].param_groups:
                    group["lr"] /= 2
                logger.log_metrics({"rate": group["lr"]})

    Reference: ``composer/core/algorithm.py``.
    """

    position: ClassVar[Mapping[Event, Literal["first", "last"]]] = {}
    """The events at which it is applied before all others, or after them, in whatever order they are given."""

    @abstractmethod
    def match(self, event: Event, state: "State") -> bool:
        """Whether to be applied at this event. Asked at every event, so keep it short."""

    @abstractmethod
    def apply(self, event: Event, state: "State", logger: "AlgorithmLogger") -> int | None:
        """Changes the state. What is returned is ignored; the reference's algorithms return an exit code here."""

    def check(self, state: "State") -> None:  # noqa: B027 - most algorithms go with every training
        """Raises :class:`offloop.bus.errors.ConfigurationError` for a training that this cannot be applied to. Asked
        before anything is started, with the model as the trainer was given it; does nothing by default."""

    def explain(self, error: RuntimeError, state: "State") -> str | None:
        """What a user can do about an error that the model raised in its forward pass because of what this has done to
        the batch: in one line, in whose place it is shown. ``None``, as by default, when this has nothing to do with
        it."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """What has to be saved so that the algorithm can resume in another process; nothing by default."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027 - most algorithms have nothing to take over
        """Takes over what :meth:`state_dict` returned."""

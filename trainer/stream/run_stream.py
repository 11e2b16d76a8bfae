"""The stream of a training, from its start to its end, with what hangs on it."""

import logging
from collections.abc import Callable
from typing import Any

from bus.publisher.publisher import Publisher
from bus.publisher.redaction import redact
from bus.runs.directory import RunInfo, changed_in_words, read_run
from bus.types.time import Time
from trainer.arguments.values import optimizer_names
from trainer.control.remote_control import RemoteControl
from trainer.distributed.ranks import Ranks, rank_zero_first
from trainer.engine.engine import Engine
from trainer.engine.logger import Logger
from trainer.engine.state import State
from trainer.stream.attached import AttachedConsumers, run_place
from trainer.stream.barrier import ConsumerBarrier
from trainer.stream.options import StreamOptions
from trainer.stream.publishing import StatePublisher
from trainer.stream.tensor_sharing import TensorSharing, share_tensors

_log = logging.getLogger("offloop")


class RunStream:
    """What a trainer publishes through, the process of its own callbacks, and the tensors that it shares; nothing of
    this without ``publish``.

    Args:
        options: what the trainer was told.
        state: what is published.
        clock: nanoseconds since 1970.
        ranks: the others, if there are any.
        shows: whether the process of callbacks says at its end where loggers wrote.
    """

    def __init__(
        self,
        options: StreamOptions,
        state: State,
        clock: Callable[[], int],
        ranks: Ranks | None = None,
        shows: bool = True,
    ) -> None:
        self.sharing: TensorSharing | None = None
        """How tensors get to consumers that ask for them; ``None`` without a stream."""
        self._publisher: Publisher | None = None
        self._attached: AttachedConsumers | None = None
        self._options = options
        self._state = state
        self._clock = clock
        self._ranks = ranks
        self._shows = shows

    def start(self, control: RemoteControl, max_duration: Time | None) -> Publisher | None:
        """Starts the run, on every rank, and the process of callbacks and loggers; ``control`` takes the commands.
        Returns what takes the snapshots.

        Raises :class:`bus.errors.RunIsLiveError`, :class:`bus.errors.RunDirectoryError` or
        :class:`bus.errors.BrokerError` when it cannot be started."""
        options = self._options
        if options.publish:
            self._publisher = publisher = self._start_publisher(control, max_duration)
            if (options.callbacks or options.loggers) and self._state.rank == 0:
                where = {**run_place(publisher, options.key, options.broker_key), "shows": self._shows}
                self._attached = AttachedConsumers(options.callbacks, options.loggers, where)
        control.answer_through(self._publisher)
        return self._publisher

    def make_engine(self, logger: Logger, control: RemoteControl) -> Engine:
        """What runs the events of the training, and publishes them."""
        options, publisher, state = self._options, self._publisher, self._state
        if publisher is None:
            return Engine(state, logger)
        self.sharing = share_tensors(state, publisher)
        published = StatePublisher(
            state,
            logger,
            publisher,
            options.always,
            options.fields,
            self.sharing,
            self._clock,
            publisher.info,
        )
        publish = published.publish
        if options.waits_for:
            publish = ConsumerBarrier(
                published, publisher, control, options.waits_for, options.wait_seconds, self._ranks
            ).publish
        return Engine(state, logger, publisher.wanted, publish)

    def close(self, status: str, error: str | None, reason: str | None, *, drain: bool) -> None:
        """Ends the run: sends what is left and waits, for a limited time, until callbacks and loggers have handled
        everything; with ``drain`` also until consumers have handled what was lent to them."""
        try:
            if self.sharing is not None and drain:
                self.sharing.drain()
            if self._publisher is not None:
                self._publisher.close(status, error, reason)
        finally:
            if self.sharing is not None:
                self.sharing.close()
            if self._attached is not None:
                self._attached.wait()

    def _start_publisher(self, control: RemoteControl, max_duration: Time | None) -> Publisher:
        options, state = self._options, self._state

        def start(broker: str | None) -> Publisher:
            return Publisher(
                state.run_name,
                runs_dir=options.runs_dir,
                broker=broker,
                rank=state.rank,
                world_size=state.world_size,
                info={**_described(state, max_duration), "config": redact(options.config)},
                events=options.always.events,
                security=options.security,
                clock=self._clock,
                max_delay=options.max_delay,
                backlog_bytes=options.backlog_bytes,
                on_command=control.take,
            )

        publisher = (
            start(options.broker) if self._ranks is None else rank_zero_first(self._ranks, start, options.broker)
        )
        if state.rank == 0 and options.broker is None:
            _warn_of_another_training(read_run(publisher.run_dir))
        return publisher


def _warn_of_another_training(run: RunInfo) -> None:
    if run.changed:
        _log.warning(
            "attempt %d of run %s trains something else than attempt %d: %s; give another training another run name",
            *(run.last.number, run.name, run.attempts[-2].number, changed_in_words(run.changed)),
        )


def _described(state: State, max_duration: Time | None) -> dict[str, Any]:
    """What is written down about a run when it starts."""
    return {
        "seed": state.seed,
        "max_duration": None if max_duration is None else str(max_duration),
        "model": type(state.model).__name__,
        "parameters": sum(parameter.numel() for parameter in state.model.parameters()),
        "optimizers": optimizer_names(state.optimizers),
        "device": str(state.device.torch_device),
    }

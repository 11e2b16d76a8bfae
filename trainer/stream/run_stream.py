"""The stream of one training, from start to close."""

import logging
import shlex
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from offloop.bus.errors import ConfigurationError
from offloop.bus.net.nats_addresses import find_servers
from offloop.bus.processes import current_folder, restarted_launch
from offloop.bus.protocol.flight_ring import FlightRing
from offloop.bus.publisher.publisher import BACKLOG_BYTES, Publisher, check_backlog_bytes
from offloop.bus.runs.directory import absolute_runs_dir, changed_in_words, free_name, read_run, runs_dir
from offloop.bus.types.demand import BASE_EVENTS, Demand
from offloop.bus.types.disabled import is_disabled
from offloop.bus.types.event import Event
from offloop.bus.types.time import Time
from offloop.trainer.arguments.checks import as_list, check_flight_recorder, check_record
from offloop.trainer.arguments.config import StreamConfig
from offloop.trainer.arguments.values import optimizer_names
from offloop.trainer.control.remote_control import RemoteControl
from offloop.trainer.distributed.ranks import Ranks, local_world_size
from offloop.trainer.engine.engine import Engine
from offloop.trainer.engine.state import AlgorithmLogger, State
from offloop.trainer.fields.field import Field
from offloop.trainer.fields.registry import check_fields
from offloop.trainer.stream.attached import AttachedConsumers, NamedCallbacks, check_loggers, check_picklable, demand_of
from offloop.trainer.stream.barrier import ConsumerBarrier, check_wait_for
from offloop.trainer.stream.flight import RingPublisher, make_ring
from offloop.trainer.stream.hosts import start_on_hosts
from offloop.trainer.stream.publishing import StatePublisher
from offloop.trainer.stream.tensor_sharing import TensorSharing, share_tensors

_log = logging.getLogger("offloop")


class TrainingStream:
    """The stream of a training: publisher, process of callbacks, and shared tensors.

    It does nothing without ``publish``, or if ``OFFLOOP_DISABLED`` is set."""

    def __init__(self, config: StreamConfig, callbacks: Any, loggers: Any) -> None:
        if is_disabled():
            config = replace(config, publish=False, stream_to=None, flight_recorder=None, wait_for=None)
            callbacks = loggers = None
        self._config = config
        self._callbacks = as_list(callbacks, object, "callbacks")
        self._loggers = as_list(loggers, object, "loggers")
        if not config.publish:
            _check_without_stream(config, self._callbacks, self._loggers)
        self._servers = find_servers(config.stream_to) if config.publish else None
        self._backlog_bytes = BACKLOG_BYTES if config.backlog_bytes is None else config.backlog_bytes
        check_backlog_bytes(self._backlog_bytes)
        requesting = _check_consumers(self._callbacks, self._loggers)
        demanded = demand_of(requesting)
        recorded = set() if config.record is None else check_record(config.record, "record")
        self._always = Demand.merge([Demand.of(BASE_EVENTS | recorded), demanded])
        self.waits_for: frozenset[str] = check_wait_for(config.wait_for, requesting)
        """Names of the consumers for which the training waits at some events."""
        self.fields: dict[str, Field] = check_fields(config.fields)
        """Fields that consumers can request."""
        self.sharing: TensorSharing | None = None
        """Sends tensors to the consumers that request them; ``None`` without a stream."""
        self.publisher: Publisher | None = None
        self.published: StatePublisher | None = None
        """Publishes the events, without waiting for consumers; ``None`` without a stream."""
        self._attached: AttachedConsumers | None = None
        self._ring: FlightRing | None = None
        self._flight: RingPublisher | None = None

    def find_name(self, run_name: str) -> str:
        config = self._config
        if not config.publish:
            return run_name
        return free_name(runs_dir(config.runs_dir), run_name, restarted_launch())

    def start(
        self,
        state: State,
        logger: AlgorithmLogger,
        control: RemoteControl,
        *,
        max_duration: Time | None,
        clock: Callable[[], int],
        ranks: Ranks | None,
        shows: bool,
        facts: Callable[[str], Mapping[str, Any]] = lambda _: {},
        run_name: str | None = None,
        resume: bool = False,
    ) -> Engine:
        """Start the run, on every rank, and the process of callbacks and loggers. Returns the engine.

        Args:
            control: applies the commands.
            shows: whether the process reports at its end where loggers wrote.
            facts: returns the rest of the description of the run of a name.
            run_name: the requested name, by default the state's, which becomes the run's. See
                :class:`offloop.bus.publisher.publisher.Publisher`, also for ``resume``.

        Raises ``RunIsLiveError``, ``RunDirectoryError`` or ``BrokerError`` when it cannot be started."""
        config, name = self._config, run_name or state.run_name
        if not config.publish:
            return Engine(state, logger)
        if config.flight_recorder is not None:
            here = local_world_size(state.world_size)
            self._ring = make_ring(check_flight_recorder(config.flight_recorder), here)
        described = {**_described(state, max_duration), "config": dict(config.config or {})}
        make = partial(
            Publisher,
            runs_dir=config.runs_dir,
            rank=state.rank,
            world_size=state.world_size,
            info=lambda name: {**described, **facts(name)},
            events=self._always.events,
            clock=clock,
            max_delay=config.max_delay,
            backlog_bytes=self._backlog_bytes,
            on_command=control.take,
            flight=self._ring,
            capture_console=config.capture_console,
        )
        self.publisher = publisher = self._start_publisher(make, name, ranks, resume)
        state.run_name = publisher.run_name
        if state.rank == 0 and (self._callbacks or self._loggers):
            where: dict[str, str | bool | None] = {"run": str(publisher.run_dir), "shows": shows}
            self._attached = AttachedConsumers(self._callbacks, self._loggers, where)
        control.answer_through(publisher)
        logger.left_out = publisher.left_out
        self.sharing = share_tensors(state, publisher)
        published = StatePublisher(
            state, logger, publisher, self._always, self.fields, self.sharing, clock, publisher.info
        )
        logger.connect(publisher, published.publish_own)
        self.published = published
        publish: Callable[[Event], None] = published.publish
        if self.waits_for:
            barrier = ConsumerBarrier(published, publisher, control, self.waits_for, config.wait_seconds, ranks)
            publish = barrier.publish
        if self._ring is not None:
            self._flight = RingPublisher(state, published, publisher, publish, self._ring, clock)
            return Engine(state, logger, self._flight.requested_events, self._flight.publish)
        return Engine(state, logger, publisher.requested_events, publish)

    def _start_publisher(
        self, make: Callable[..., Publisher], name: str, ranks: Ranks | None, resume: bool
    ) -> Publisher:
        if ranks is None:
            publisher = make(name, stream_to=self._servers, resume=resume)
        else:
            runs = absolute_runs_dir(self._config.runs_dir)
            publisher = start_on_hosts(ranks, make, runs, name, self._servers, resume)
        run = read_run(publisher.run_dir) if ranks is None or ranks.rank == 0 else None
        if run is not None and run.changed:
            _log.warning(
                "attempt %d of run %s differs from attempt %d: %s; give a different training another run name",
                *(run.last.number, run.name, run.attempts[-2].number, changed_in_words(run.changed)),
            )
        return publisher

    def introduce(self, run_name: str, resumed_from: str | None) -> str:
        publisher, runs_dir = self.publisher, self._config.runs_dir
        begin = "from the beginning" if resumed_from is None else f"resuming from {resumed_from}"
        if publisher is None or publisher.recording is None:
            resumed = "" if resumed_from is None else f", {begin}"
            return f"run {run_name}{resumed}: no stream, so there is nothing to watch or record"
        is_resumed = resumed_from is not None or publisher.attempt > 1
        attempt = f", attempt {publisher.attempt}, {begin}" if is_resumed else ""
        where = f" --runs-dir {shlex.quote(str(runs_dir))}" if runs_dir else ""
        watch = f"watch it with: consumer --callbacks speed,lr{where}"
        if self._servers is not None:
            watch += f"; once it is copied to {self._servers}, elsewhere with: consumer --stream {self._servers} "
            watch += f"--run {run_name} --callbacks speed,lr"
        return f"run {run_name}{attempt}: recording to {short_path(publisher.recording)}; {watch}"

    def close(self, status: str, error: str | None, reason: str | None, *, drain: bool) -> None:
        """End the run and wait for callbacks and loggers; with ``drain`` also for consumers that borrowed tensors."""
        try:
            if self.published is not None:
                self.published.publish_logged()
            if self.sharing is not None and drain:
                self.sharing.drain()
            if self.publisher is not None:
                self.publisher.close(status, error, reason)
        finally:
            if self.sharing is not None:
                self.sharing.close()
            if self._flight is not None:
                self._flight.close()
            elif self._ring is not None:
                self._ring.close()
            if self._attached is not None:
                self._attached.wait()


def _described(state: State, max_duration: Time | None) -> dict[str, Any]:
    return {
        "seed": state.seed,
        "max_duration": None if max_duration is None else str(max_duration),
        "model": type(state.model).__name__,
        "parameters": sum(parameter.numel() for parameter in state.model.parameters()),
        "optimizers": optimizer_names(state.optimizers),
        "device": str(state.device.torch_device),
    }


def _check_without_stream(config: StreamConfig, callbacks: list[Any], loggers: list[Any]) -> None:
    given = {"callbacks": callbacks, "loggers": loggers, "wait_for": config.wait_for, "stream_to": config.stream_to}
    for name, value in (given | {"flight_recorder": config.flight_recorder}).items():
        if value not in (None, []):
            raise ConfigurationError(f"{name} needs the stream: leave out publish=False, or {name}", name=name)


def _check_consumers(callbacks: list[Any], loggers: list[Any]) -> list[Any]:
    check_picklable(callbacks, "callbacks")
    check_picklable(loggers, "loggers")
    check_loggers(one for one in loggers if not isinstance(one, str))
    names = [[one for one in given if isinstance(one, str)] for given in (callbacks, loggers)]
    own = [one for one in callbacks if not isinstance(one, str)]
    return [*own, NamedCallbacks(*names)] if any(names) else own


def short_path(path: Path) -> str:
    here = current_folder()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)

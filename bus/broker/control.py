"""Control endpoint of a broker: all requests except events."""

import json
import logging
import socket
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from offloop.bus import processes
from offloop.bus.broker.consumers import LEASE_SECONDS
from offloop.bus.broker.flight import ASKED
from offloop.bus.broker.messages import HandledMessage, HelloMessage, LeaseMessage, OutcomeMessage, ResumeMessage, parse
from offloop.bus.broker.rank import LiveRank
from offloop.bus.broker.run import BrokerRun
from offloop.bus.errors import BrokerError, ConfigurationError, OffloopError, ProtocolError, RunDirectoryError
from offloop.bus.protocol.frames import PROTOCOL_VERSION, Control, check_run_name
from offloop.bus.runs.directory import is_name_for
from offloop.bus.tensors.segments import read_piece
from offloop.bus.types.commands import DUMP, STACKS, Command, check_command, new_command_id
from offloop.bus.types.demand import Demand

if TYPE_CHECKING:
    from offloop.bus.broker.broker import Broker

_log = logging.getLogger("offloop.broker")

MAX_LISTED = 1000
MAX_REASON = 1000


class _Request(NamedTuple):
    """Sender and id of the current request."""

    identity: bytes
    id: str | None = None


class ControlHandler:
    def __init__(self, broker: "Broker") -> None:
        self._broker = broker
        self._send = broker.send
        self._senders: dict[str, bytes] = {}  # senders of unanswered commands, by command id
        self._kinds: dict[str, tuple[Any, Callable[[_Request, Any], None]]] = {
            "hello": (HelloMessage, self._welcome),
            "resume": (ResumeMessage, self._resume),
            "report": (dict, self._note_report),
            "applied": (OutcomeMessage, self._report_outcome),
            "lease": (LeaseMessage, self._lease),
            "handled": (HandledMessage, self._note_handled),
            "command": (dict, self._relay),
            "fetch_segment": (dict, self._fetch_segment),
            "statistics": (dict, self._send_statistics),
        }

    def take(self, identity: bytes, message: Control) -> None:
        """Handle a message and answer it. Raise ProtocolError for a malformed one, after the answer."""
        request = _Request(identity)
        try:
            asked = message.content.get("id")
            if not isinstance(asked, str | None):
                raise ProtocolError(f"the id {str(asked)[:40]!r} is not a text")
            request = _Request(identity, asked)
            if message.version != PROTOCOL_VERSION:
                raise BrokerError(
                    f"this {message.kind[:40]!r} is of protocol version {message.version}, and this broker speaks "
                    f"version {PROTOCOL_VERSION}: use an offloop of the same protocol version on both sides"
                )
            form, act = self._kinds.get(message.kind, (dict, self._refuse_kind))
            act(request, parse(message.content, form))
        except (ProtocolError, KeyError, TypeError, ValueError, OverflowError, AttributeError, RecursionError) as error:
            reason = f"{message.kind[:40]} is malformed: {error or type(error).__name__}"[:MAX_REASON]
            self._reply(request, "refused", {"reason": reason, "error": "ProtocolError"})
            raise ProtocolError(reason) from None
        except OffloopError as error:
            self._reply(request, "refused", {"reason": str(error)[:MAX_REASON], "error": type(error).__name__})
        except OSError as error:
            self._reply(request, "refused", {"reason": f"{message.kind}: {error}", "error": "RunDirectoryError"})

    def _refuse_kind(self, request: _Request, content: dict[str, Any]) -> None:
        raise ProtocolError(f"unknown message to a broker: use one of {', '.join(sorted(self._kinds))}")

    def _find(self, name: str) -> BrokerRun:
        run = self._broker.run
        if run is None or run.name != name:
            raise BrokerError(f"run {name!r} is not live here")
        return run

    def _reply(self, request: _Request, kind: str, content: dict[str, Any]) -> None:
        self._send(request.identity, kind, content if request.id is None else {**content, "id": request.id})

    def _welcome(self, request: _Request, hello: HelloMessage) -> None:
        """Accept a publisher: the first of a new attempt, a further rank, or a known one that has reconnected."""
        if hello.role is None and hello.rank >= hello.world_size:
            raise ConfigurationError(f"rank {hello.rank} of {hello.world_size}: ranks go from 0 to world_size - 1")
        if (hello.local_world_size or 1) > hello.world_size:
            raise ConfigurationError(
                f"local_world_size {hello.local_world_size} exceeds world_size, {hello.world_size}"
            )
        held = Demand.from_wire(hello.demand) if hello.attempt is not None and hello.demand else None
        # run.json cannot hold everything that a message can: check before anything is created.
        json.dumps(hello.info, default=str)
        broker, directory = self._broker, self._broker.directory
        own = directory.name
        if hello.run != own and not (hello.new and is_name_for(own, check_run_name(hello.run))):
            raise BrokerError(f"this broker serves only run {own!r}: publish {hello.run!r} without broker=")
        if broker.run is None:
            if hello.role is not None:
                raise BrokerError(f"run {own!r} has ended or not begun: join it while it is live")
            if broker.has_ended:
                raise BrokerError(f"run {own!r} has ended: publish without broker=, which starts another broker")
            if hello.attempt is not None:
                status = directory.describe_status()
                raise BrokerError(f"attempt {hello.attempt} of run {own!r} cannot continue: {status}")
            broker.run = BrokerRun.begin(directory, hello, broker.addresses, broker.statistics)
        run = broker.run
        rank = self._admit(run, request.identity, hello)
        if held is not None:
            try:
                run.consumers.renew(rank.rank, held, time.monotonic())
            except BrokerError as error:
                _log.warning("rank %d loses its demand until consumers have reconnected: %s", rank.rank, error)
        self.push_demand(run)
        recording = run.writer.path
        welcome = {
            "run": run.name,
            "attempt": run.attempt,
            "id": directory.run_id,
            "event_feed": broker.addresses[1],
            "path": str(recording.parent),
            "recording": recording.name,
            **self._news(run, rank),
            "acknowledged": rank.acknowledged,
            "ended": rank.seq if rank.ended else None,
        }
        if rank.actor is None:
            try:
                welcome["console"] = run.console.attach(rank.rank, is_new=hello.attempt is None)
            except OSError as error:
                text = f"nothing that rank {rank.rank} prints is captured: its pipe cannot be made ({error})"
                self._send(request.identity, "notice", {"text": text})
        else:
            welcome |= {"rank": rank.rank, "name": rank.actor.name, "timestamp": run.training_time}
            welcome["published_before"] = run.published_before(rank)
        self._reply(request, "welcome", welcome)
        if run.write_error is not None:
            self._send(request.identity, "trouble", {"reason": run.write_error})

    def _admit(self, run: BrokerRun, identity: bytes, hello: HelloMessage) -> LiveRank:
        rank = run.rank_of(hello) if hello.role is None else run.actor_of(hello)
        self._broker.forget_connection(rank)
        rank.identity = identity
        self._broker.publishers[identity] = rank
        # A container may have its host's name, but different processes.
        is_seen = hello.host == socket.gethostname() and processes.is_running(hello.pid, hello.started)
        rank.pid, rank.started = (hello.pid, hello.started) if is_seen else (None, None)
        rank.stacks = hello.stacks
        if hello.flight is not None and (problem := run.flight.attach(rank, hello.flight)) is not None:
            _log.warning("run %s: %s", run.name, problem)
            self._send(identity, "notice", {"text": problem})
        process = {"pid": hello.pid, "started": hello.started, "host": hello.host}
        try:
            actor = {} if rank.actor is None else {"name": rank.actor.name, "role": rank.actor.role}
            run.directory.note_publisher({"rank": rank.rank, "publisher_id": hello.publisher_id, **process, **actor})
        except (OSError, RunDirectoryError) as error:
            _log.error("run %s: %s", run.name, error)
        return rank

    def _publisher(self, identity: bytes) -> tuple[BrokerRun, LiveRank] | None:
        """Return run and rank of a publisher, or report to the peer that it is unknown to this broker."""
        place = self._broker.publisher(identity)
        if place is None:
            self._send(identity, "unknown", {})
        return place

    def _resume(self, request: _Request, resume: ResumeMessage) -> None:
        if (place := self._publisher(request.identity)) is None:
            return
        run, rank = place
        run.skip_to(rank, resume.first)

    def _note_report(self, request: _Request, content: dict[str, Any]) -> None:
        report = parse({name: value for name, value in content.items() if name != "id"}, dict[str, int | float])
        if (place := self._publisher(request.identity)) is None:
            return
        _, rank = place
        rank.reported_at = time.monotonic()
        if len(report) > 1:
            rank.report = report
        if report.get("last_sent", 0) > rank.seq:
            # It was sent earlier on the same connection, so it got lost on the way.
            self._broker.request_missing(rank)

    def _lease(self, request: _Request, lease: LeaseMessage) -> None:
        identity = request.identity
        run = self._find(lease.run)
        is_news = run.consumers.renew(
            identity,
            Demand() if lease.viewer else Demand.from_wire(lease.demand),
            time.monotonic(),
            lease.name,
            barrier_events=() if lease.viewer else lease.barrier_events or (),
            handled=lease.handled,
            report=lease.report,
        )
        self._reply(request, "leased", {"seconds": LEASE_SECONDS})
        if is_news:
            # A publisher may wait for this consumer.
            self.push_demand(run)
            self._push_progress(run, identity)

    def _note_handled(self, request: _Request, handled: HandledMessage) -> None:
        run = self._find(handled.run)
        run.consumers.note_handled(request.identity, handled.handled)
        self._push_progress(run, request.identity)

    def _push_progress(self, run: BrokerRun, consumer: bytes) -> None:
        for identity, rank in run.publishers():
            if progress := run.consumers.to_wire(rank.rank, [consumer]):
                self._send(identity, "consumers", {"consumers": progress})

    def push_demand(self, run: BrokerRun) -> None:
        """Send changed demand and consumers to publishers, in one message: lenders of memory must know both."""
        run.consumers.forget_gone(lambda consumer: self._send(consumer, "beat", {}))
        news = run.consumers.merged(time.monotonic()), run.consumers.version
        if news == run.reported:
            return
        run.reported = news
        for identity, rank in run.publishers():
            self._send(identity, "demand", self._news(run, rank))

    def _news(self, run: BrokerRun, rank: LiveRank) -> dict[str, Any]:
        return {"demand": run.reported[0].to_wire(), "consumers": run.consumers.to_wire(rank.rank)}

    def _fetch_segment(self, request: _Request, content: dict[str, Any]) -> None:
        run = self._find(content["run"])
        publishers = [rank.pid for rank in run.ranks.values() if rank.pid is not None]
        self._reply(request, "segment_data", read_piece(publishers, content))

    def _relay(self, request: _Request, content: dict[str, Any]) -> None:
        run, command = self._find(content["run"]), Command.from_wire(content)
        check_command(command.name, command.arguments)
        command = command if command.id else msgspec.structs.replace(command, id=new_command_id())
        if command.name in (DUMP, STACKS):
            self._ask_recorder(request._replace(id=command.id), run, command)
            return
        if self._senders.get(command.id, request.identity) != request.identity:
            raise BrokerError(f"another command has the id {command.id!r}: choose another")
        publishers = [identity for identity, rank in run.publishers() if rank.actor is None]
        if publishers and run.local_world_size < run.world_size and 0 not in run.ranks:
            raise BrokerError(
                f"commands for run {run.name!r} go to its first rank, which is on another host: send it by '--stream'"
            )
        if publishers:
            self._senders[command.id] = request.identity
        for publisher in publishers:
            self._send(publisher, "command", command.to_wire())
        self._reply(request._replace(id=command.id), "accepted", {"ranks": len(publishers)})

    def _ask_recorder(self, request: _Request, run: BrokerRun, command: Command) -> None:
        """Write the flight recorder's dump or the ranks' stacks, without the training."""

        def answer(done: str | None, error: str | None) -> None:
            outcome = {"id": command.id, "event": None, "batch": None, "error": error, "done": done}
            self._send(request.identity, "applied", outcome)

        self._reply(request, "accepted", {"ranks": len(run.trainers)})
        if command.name == STACKS:
            run.flight.ask_stacks(run.trainers, command.reason or "", answer)
            return
        reason = str(command.arguments[0]) if command.arguments else ASKED
        run.flight.ask(reason, command.reason or "", answer)

    def _report_outcome(self, request: _Request, outcome: OutcomeMessage) -> None:
        is_publisher = self._broker.publisher(request.identity) is not None
        sender = self._senders.pop(outcome.id, None) if is_publisher else None
        if sender is not None:
            self._send(sender, "applied", msgspec.structs.asdict(outcome))

    def end(self) -> None:
        for command, sender in self._senders.items():
            outcome = {"id": command, "event": None, "batch": None, "error": "the run has ended"}
            self._send(sender, "applied", outcome)
        self._senders.clear()

    def _send_statistics(self, request: _Request, content: dict[str, Any]) -> None:
        run = self._find(content["run"])
        statistics = {
            "broker": asdict(self._broker.statistics) | {"recorded": run.writer.written},
            "publishers": [
                {"rank": number, **({} if rank.actor is None else {"name": rank.actor.name}), **rank.report}
                for number, rank in run.ranks.items()
            ],
            "consumers": run.consumers.describe(time.monotonic())[:MAX_LISTED],
            "trouble": run.write_error,
        }
        self._reply(request, "statistics", statistics)

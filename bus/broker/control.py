"""What peers ask of a broker at its control endpoint, events aside."""

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, NamedTuple

import msgspec

from offloop.bus.broker.consumers import LEASE_SECONDS
from offloop.bus.broker.flight import ASKED
from offloop.bus.broker.messages import (
    HandledMessage,
    HelloMessage,
    LeaseMessage,
    OutcomeMessage,
    ResumeMessage,
    parse,
)
from offloop.bus.broker.rank import LiveRank
from offloop.bus.broker.run import BrokerRun
from offloop.bus.broker.service import RunService, Send
from offloop.bus.errors import BrokerError, OffloopError, ProtocolError
from offloop.bus.protocol.frames import PROTOCOL_VERSION, Control
from offloop.bus.tensors.transfer import read_piece
from offloop.bus.types.commands import DUMP, Command, check_command, new_command_id
from offloop.bus.types.demand import Demand

MAX_LISTED = 1000
MAX_REASON = 1000


class _Request(NamedTuple):
    """The sender and the id of the current request."""

    identity: bytes
    id: str | None = None


class ControlHandler:
    """Answers control messages, by ``send``."""

    def __init__(self, service: RunService, send: Send) -> None:
        self._service = service
        self._send = send
        self._senders: dict[str, bytes] = {}
        """The senders of commands that have not been answered, by the commands' ids."""
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
        """Does what a message asks for, and answers; a request that cannot be met is refused with the reason. An answer
        carries the ``id`` of its request.

        Raises:
            ProtocolError: it is not a message of this protocol; its sender has been answered.
        """
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
        raise ProtocolError(f"there is no such message to a broker; there are {', '.join(sorted(self._kinds))}")

    def _reply(self, request: _Request, kind: str, content: dict[str, Any]) -> None:
        self._send(request.identity, kind, content if request.id is None else {**content, "id": request.id})

    # -- publishers ---------------------------------------------------------------------------------------------------

    def _welcome(self, request: _Request, hello: HelloMessage) -> None:
        run, rank = self._service.greet(request.identity, hello)
        self.push_demand(run)
        recording = run.writer.path
        welcome = {
            "run": run.name,
            "attempt": run.attempt,
            "id": run.directory.run_id,
            "event_feed": self._service.event_feed,
            "path": str(recording.parent),
            "recording": recording.name,
            **self._news(run, rank),
            "acknowledged": rank.acknowledged,
            "ended": rank.seq if rank.ended else None,
        }
        self._reply(request, "welcome", welcome)
        if run.write_error is not None:
            self._send(request.identity, "trouble", {"reason": run.write_error})

    def reject_unknown(self, identity: bytes) -> None:
        """Answers an unknown publisher: it may have known an earlier broker of this run."""
        self._send(identity, "unknown", {})

    def _resume(self, request: _Request, resume: ResumeMessage) -> None:
        place = self._service.publisher(request.identity)
        if place is None:
            self.reject_unknown(request.identity)
        elif resume.after is not None and place[1].seq < resume.after:
            # What was sent before it was lost on the way.
            self._service.request_missing(place[1])
        else:
            run, rank = place
            run.skip_to(rank, resume.first)

    def _note_report(self, request: _Request, content: dict[str, Any]) -> None:
        report = parse({name: value for name, value in content.items() if name != "id"}, dict[str, int | float])
        place = self._service.publisher(request.identity)
        if place is None:
            self.reject_unknown(request.identity)
            return
        _, rank = place
        rank.reported_at = time.monotonic()
        if len(report) > 1:
            rank.report = report
        if report.get("last_sent", 0) > rank.seq:
            # It was sent before this message on the same connection, so it was lost on the way.
            self._service.request_missing(rank)

    # -- consumers ----------------------------------------------------------------------------------------------------

    def _lease(self, request: _Request, lease: LeaseMessage) -> None:
        identity = request.identity
        run = self._service.find(lease.run)
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
            # Someone may wait for this consumer.
            self.push_demand(run)
            self._push_progress(run, identity)

    def _note_handled(self, request: _Request, handled: HandledMessage) -> None:
        run = self._service.find(handled.run)
        run.consumers.note_handled(request.identity, handled.handled)
        self._push_progress(run, request.identity)

    def _push_progress(self, run: BrokerRun, consumer: bytes) -> None:
        for identity, rank in run.publishers():
            if progress := run.consumers.to_wire(rank.rank, [consumer]):
                self._send(identity, "consumers", {"consumers": progress})

    def push_demand(self, run: BrokerRun) -> None:
        """Reports to a run's publishers the demand of its consumers, and who they are, when that has changed: in one
        message, because a publisher that waits for a consumer, or lends it memory, has to know both."""
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
        run = self._service.find(content["run"])
        publishers = [rank.pid for rank in run.ranks.values() if rank.pid is not None]
        self._reply(request, "segment_data", read_piece(publishers, content))

    # -- anyone -------------------------------------------------------------------------------------------------------

    def _relay(self, request: _Request, content: dict[str, Any]) -> None:
        run, command = self._service.find(content["run"]), Command.from_wire(content)
        check_command(command.name, command.arguments)
        command = command if command.id else msgspec.structs.replace(command, id=new_command_id())
        if command.name == DUMP:
            self._dump(request._replace(id=command.id), run, command)
            return
        if self._senders.get(command.id, request.identity) != request.identity:
            raise BrokerError(f"another command has the id {command.id!r}: choose another")
        publishers = [identity for identity, _ in run.publishers()]
        if publishers and run.local_world_size < run.world_size and 0 not in run.ranks:
            raise BrokerError(
                f"commands for run {run.name!r} go to its first rank, which is on another host: send it by '--stream'"
            )
        if publishers:
            self._senders[command.id] = request.identity
        for publisher in publishers:
            self._send(publisher, "command", command.to_wire())
        self._reply(request._replace(id=command.id), "accepted", {"ranks": len(publishers)})

    def _dump(self, request: _Request, run: BrokerRun, command: Command) -> None:
        """Has the flight recorder written; the training takes no part in that."""

        def answer(done: str | None, error: str | None) -> None:
            outcome = {"id": command.id, "event": None, "batch": None, "error": error, "done": done}
            self._send(request.identity, "applied", outcome)

        self._reply(request, "accepted", {"ranks": len(run.ranks)})
        reason = str(command.arguments[0]) if command.arguments else ASKED
        run.flight.ask(reason, command.reason or "", answer, command.id)

    def _report_outcome(self, request: _Request, outcome: OutcomeMessage) -> None:
        is_publisher = self._service.publisher(request.identity) is not None
        sender = self._senders.pop(outcome.id, None) if is_publisher else None
        if sender is not None:
            self._send(sender, "applied", msgspec.structs.asdict(outcome))

    def end(self) -> None:
        """Answers the senders that still wait for a command: the run has ended."""
        for command, sender in self._senders.items():
            outcome = {"id": command, "event": None, "batch": None, "error": "the run has ended"}
            self._send(sender, "applied", outcome)
        self._senders.clear()

    def _send_statistics(self, request: _Request, content: dict[str, Any]) -> None:
        run = self._service.find(content["run"])
        statistics = {
            "broker": asdict(self._service.statistics()),
            "publishers": [{"rank": number, **rank.report} for number, rank in run.ranks.items()],
            "consumers": run.consumers.describe(time.monotonic())[:MAX_LISTED],
            "trouble": run.write_error,
        }
        self._reply(request, "statistics", statistics)

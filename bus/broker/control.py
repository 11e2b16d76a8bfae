"""What peers ask of a broker at its control endpoint, events aside."""

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, NamedTuple

from offloop.bus.broker.content import boolean, integer, integer_or_none, text, text_or_none
from offloop.bus.broker.flight import ASKED
from offloop.bus.broker.peers import Peers
from offloop.bus.broker.rank import LiveRank
from offloop.bus.broker.run import MAX_RESUME, BrokerRun
from offloop.bus.broker.segments import SegmentServer
from offloop.bus.broker.service import RunService
from offloop.bus.errors import BrokerError, OffloopError, ProtocolError
from offloop.bus.protocol.frames import PROTOCOL_VERSION, Control
from offloop.bus.types.commands import DUMP, Command, check_command, new_command_id
from offloop.bus.types.demand import Demand
from offloop.bus.types.timeouts import Timeouts

MAX_REPORT = 50
MAX_NAME = 100
MAX_LISTED = 1000
MAX_REMEMBERED = 1000
MAX_REASON = 1000
MAX_OUTCOME = 1 << 16
MAX_ID = 100


class _Request(NamedTuple):
    """Whose question is being answered, and what the sender calls it."""

    identity: bytes
    id: str | None = None


class ControlHandler:
    """Answers the control messages of ``peers``."""

    def __init__(self, service: RunService, peers: Peers, timeouts: Timeouts) -> None:
        self._timeouts = timeouts
        self._service = service
        self._peers = peers
        self._rejected: dict[bytes, float] = {}
        # Who sent each command that has not been answered, by the command's id.
        self._senders: OrderedDict[str, tuple[bytes, str]] = OrderedDict()
        self._segments = SegmentServer(timeouts.segment)
        self._kinds: dict[str, Callable[[_Request, dict[str, Any]], None]] = {
            "hello": self._welcome,
            "resume": self._resume,
            "report": self._note_report,
            "applied": self._report_outcome,
            "lease": self._lease,
            "handled": self._note_handled,
            "command": self._relay,
            "fetch_segment": self._fetch_segment,
            "statistics": self._send_statistics,
        }

    def take(self, identity: bytes, message: Control) -> None:
        """Does what a message asks for, and answers; a request that cannot be met is refused with the reason. An answer
        carries the ``id`` of its request.

        Raises:
            ProtocolError: it is not a message of this protocol; its sender has been answered.
        """
        request = _Request(identity)
        try:
            request = _Request(identity, text_or_none(message.content, "id", MAX_ID))
            self._act(request, message)
        except (ProtocolError, KeyError, TypeError, ValueError, OverflowError, AttributeError, RecursionError) as error:
            reason = f"{message.kind[:40]} is malformed: {error or type(error).__name__}"[:MAX_REASON]
            self._reply(request, "refused", {"reason": reason, "error": "ProtocolError"})
            raise ProtocolError(reason) from None
        except OffloopError as error:
            self._reply(request, "refused", {"reason": str(error)[:MAX_REASON], "error": type(error).__name__})
        except OSError as error:
            self._reply(request, "refused", {"reason": f"{message.kind}: {error}", "error": "RunDirectoryError"})

    def _act(self, request: _Request, message: Control) -> None:
        if message.version != PROTOCOL_VERSION:
            raise BrokerError(
                f"this {message.kind[:40]!r} is of protocol version {message.version}, and this broker speaks version "
                f"{PROTOCOL_VERSION}: use an offloop of the same protocol version on both sides"
            )
        act = self._kinds.get(message.kind)
        if act is None:
            raise ProtocolError(f"there is no such message to a broker; there are {', '.join(sorted(self._kinds))}")
        act(request, message.content)

    def _reply(self, request: _Request, kind: str, content: dict[str, Any]) -> None:
        """Answers a request."""
        self._peers.send(request.identity, kind, content if request.id is None else {**content, "id": request.id})

    # -- publishers ---------------------------------------------------------------------------------------------------

    def _welcome(self, request: _Request, hello: dict[str, Any]) -> None:
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
            self._peers.send(request.identity, "trouble", {"reason": run.write_error})

    def reject_unknown(self, identity: bytes) -> bool:
        """Answers an unknown publisher with ``unknown``, at most once a second: it may have known an earlier broker at
        this address. Returns whether it was answered now."""
        now = time.monotonic()
        if now - self._rejected.get(identity, 0.0) <= self._timeouts.reject:
            return False
        if len(self._rejected) >= MAX_REMEMBERED:
            self._rejected.clear()
        self._rejected[identity] = now
        self._peers.send(identity, "unknown", {})
        return True

    def _resume(self, request: _Request, content: dict[str, Any]) -> None:
        first, after = integer(content, "from", 1, MAX_RESUME), integer_or_none(content, "after")
        place = self._service.publisher(request.identity)
        if place is None:
            self.reject_unknown(request.identity)
        elif after is not None and place[1].seq < after:
            # What was sent before it was lost on the way.
            self._service.request_missing(place[1])
        else:
            run, rank = place
            run.skip_to(rank, first)

    def _note_report(self, request: _Request, content: dict[str, Any]) -> None:
        report = _report({name: value for name, value in content.items() if name != "id"})
        place = self._service.publisher(request.identity)
        if place is None:
            self.reject_unknown(request.identity)
            return
        _, rank = place
        if len(report) > 1:
            rank.report = report
        if report.get("last_sent", 0) > rank.seq:
            # It was sent before this message on the same connection, so it was lost on the way.
            self._service.request_missing(rank)

    # -- consumers ----------------------------------------------------------------------------------------------------

    def _lease(self, request: _Request, lease: dict[str, Any]) -> None:
        identity = request.identity
        run = self._service.find(text(lease, "run"))
        name, report = text_or_none(lease, "name"), _report(lease.get("report", {}))
        demand = Demand.from_wire(lease["demand"])
        # A bridge marks readers that may only view: what they see costs the training nothing.
        if boolean(lease, "viewer"):
            lease, demand = {**lease, "barrier_events": None}, Demand()
        run.leases.renew(identity, demand, time.monotonic(), name, report)
        is_news = run.consumers.renew(identity, lease, demand.fields, time.monotonic())
        self._reply(request, "leased", {"seconds": self._timeouts.lease})
        if is_news:
            # Someone may wait for this consumer.
            self.push_demand(run)
            self._push_progress(run, identity)

    def _note_handled(self, request: _Request, content: dict[str, Any]) -> None:
        run = self._service.find(text(content, "run"))
        run.consumers.note_handled(request.identity, content.get("handled"))
        self._push_progress(run, request.identity)

    def _push_progress(self, run: BrokerRun, consumer: bytes) -> None:
        """Reports to a run's publishers how far a consumer is."""
        for rank in run.publishers():
            progress = run.consumers.to_wire(rank.rank, [consumer])
            if progress and rank.identity is not None:
                self._peers.send(rank.identity, "consumers", {"consumers": progress})

    def push_demand(self, run: BrokerRun) -> None:
        """Reports to a run's publishers the demand of its consumers, and who they are, when that has changed: in one
        message, because a publisher that waits for a consumer, or lends it memory, has to know both."""
        now = time.monotonic()
        run.consumers.forget_ended(now, self._peers.is_there)
        demand = run.leases.merged(now)
        if (demand, run.consumers.version) == (run.demand, run.consumers_reported):
            return
        run.demand, run.consumers_reported = demand, run.consumers.version
        for rank in run.publishers():
            if rank.identity is not None:
                self._peers.send(rank.identity, "demand", self._news(run, rank))

    def _news(self, run: BrokerRun, rank: LiveRank) -> dict[str, Any]:
        """What a publisher has to know of its run's consumers."""
        return {
            "demand": run.demand.to_wire(),
            "consumers": run.consumers.to_wire(rank.rank),
        }

    def _fetch_segment(self, request: _Request, content: dict[str, Any]) -> None:
        run = self._service.find(text(content, "run"))
        publishers = [rank.pid for rank in run.ranks.values() if rank.pid is not None]
        self._reply(request, "segment_data", self._segments.read(publishers, content))

    def tidy(self) -> None:
        """Ends what is not used any more."""
        self._segments.tidy()

    def close(self) -> None:
        """Gives back what is held for consumers."""
        self._segments.close()

    # -- anyone -------------------------------------------------------------------------------------------------------

    def _relay(self, request: _Request, content: dict[str, Any]) -> None:
        run, command = self._service.find(text(content, "run")), Command.from_wire(content)
        check_command(command.name, command.arguments)
        command = command if command.id else command._replace(id=new_command_id())
        if command.name == DUMP:
            self._dump(request._replace(id=command.id), run, command)
            return
        sender = request.identity, run.name
        if self._senders.get(command.id, sender) != sender:
            raise BrokerError(f"another command has the id {command.id!r}: choose another")
        publishers = [rank.identity for rank in run.ranks.values() if not rank.ended and rank.identity is not None]
        if publishers and run.local_world_size < run.world_size and 0 not in run.ranks:
            raise BrokerError(
                f"commands for run {run.name!r} go to its first rank, which is on another host: send it to the broker "
                "there, or by '--stream'"
            )
        if publishers:
            self._senders[command.id] = sender
            if len(self._senders) > MAX_REMEMBERED:
                self._senders.popitem(last=False)
        for publisher in publishers:
            self._peers.send(publisher, "command", command.to_wire())
        self._reply(request._replace(id=command.id), "accepted", {"ranks": len(publishers)})

    def _dump(self, request: _Request, run: BrokerRun, command: Command) -> None:
        """Has the flight recorder written; the training takes no part in that."""

        def answer(done: str | None, error: str | None) -> None:
            outcome = {"id": command.id, "event": None, "batch": None, "error": error, "done": done}
            self._peers.send(request.identity, "applied", outcome)

        self._reply(request, "accepted", {"ranks": len(run.ranks)})
        reason = str(command.arguments[0]) if command.arguments else ASKED
        run.flight.ask(reason, command.reason or "", answer, command.id)

    def _report_outcome(self, request: _Request, content: dict[str, Any]) -> None:
        command = text(content, "id", MAX_ID)
        outcome = {
            "id": command,
            "event": text_or_none(content, "event"),
            "batch": integer_or_none(content, "batch"),
            "error": text_or_none(content, "error", MAX_OUTCOME),
            "done": text_or_none(content, "done", MAX_OUTCOME),
        }
        place = self._service.publisher(request.identity)
        sender = self._senders.pop(command, None) if place is not None else None
        if sender is not None:
            self._peers.send(sender[0], "applied", outcome)

    def end(self, run: BrokerRun) -> None:
        """Answers the senders that still wait for a command of a run that has ended."""
        for command, (sender, name) in tuple(self._senders.items()):
            if name == run.name:
                del self._senders[command]
                outcome = {"id": command, "event": None, "batch": None, "error": "the run has ended"}
                self._peers.send(sender, "applied", outcome)

    def _send_statistics(self, request: _Request, content: dict[str, Any]) -> None:
        run = self._service.find(text(content, "run"))
        statistics = {
            "broker": asdict(self._service.statistics()),
            "publishers": [{"rank": number, **rank.report} for number, rank in run.ranks.items()],
            "consumers": run.leases.describe(time.monotonic())[:MAX_LISTED],
            "trouble": run.write_error,
        }
        self._reply(request, "statistics", statistics)


def _report(values: Any) -> dict[str, float]:
    """What a peer says about itself: numbers by name, and not many, because it is kept."""
    if type(values) is not dict or len(values) > MAX_REPORT:
        raise ProtocolError(f"its report is not a map of at most {MAX_REPORT} numbers")
    for name, value in values.items():
        if type(name) is not str or len(name) > MAX_NAME or type(value) not in (int, float):
            raise ProtocolError(
                f"{str(name)[:40]!r} in its report is not a number with a name of at most {MAX_NAME} characters"
            )
    return values

"""Snapshots: the read-only state that callbacks receive."""

from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any, NoReturn, TypeAlias

import msgspec

from offloop.bus.errors import FieldNotAvailableError, FrozenSnapshotError, ProtocolError
from offloop.bus.protocol.frames import PROTOCOL_VERSION, EventBody
from offloop.bus.tensors.view import Fetch, Tensors, is_tensors, open_tensors
from offloop.bus.types.commands import Command, check_command
from offloop.bus.types.event import Event
from offloop.bus.types.time import Time, TimeUnit
from offloop.bus.types.timestamp import Timestamp, TrainingTime

CommandSender: TypeAlias = "Callable[[Snapshot, Command], object]"  # receives commands sent through a snapshot

_new_timestamp = Timestamp.__new__


class Snapshot(msgspec.Struct, eq=False):
    """The state at one event: training time, loss, learning rates, and all other published fields.

    Attributes have the names of a training state (``state.timestamp.batch``, ``state.loss``, ``state.max_duration``).
    Any other published field is an attribute too. Snapshots are read-only, and equal whether live or recorded. A field
    that was not published raises :class:`~offloop.bus.errors.FieldNotAvailableError`; an assignment raises
    :class:`~offloop.bus.errors.FrozenSnapshotError`."""

    event: Event
    """The event."""
    run_name: str
    """Name of the run."""
    rank: int
    """Rank of the publishing process."""
    _body: EventBody
    _send: "CommandSender | None" = None
    _fetch: "Fetch | None" = None
    _opened: dict[str, Tensors] | None = None

    @classmethod
    def build(
        cls,
        event: Event,
        *,
        run_name: str = "run",
        attempt: int = 1,
        rank: int = 0,
        seq: int = 1,
        time_ns: int = 0,
        timestamp: Timestamp | None = None,
        previous_timestamp: Timestamp | None = None,
        eval_timestamp: Timestamp | None = None,
        predict_timestamp: Timestamp | None = None,
        max_duration: Time | str | None = None,
        on_command: Callable[[str, tuple[Any, ...]], object] | None = None,
        **fields: Any,
    ) -> "Snapshot":
        """Build a snapshot for tests of callbacks.

        ``on_command(name, arguments)`` is called with each command that a callback sends. ``fields`` are further
        published fields, such as ``loss=0.5``, ``lr={"SGD": [0.1]}``, ``batch_size=32``."""
        if eval_timestamp is not None:
            fields["eval_timestamp"] = list(eval_timestamp.values)
        if predict_timestamp is not None:
            fields["predict_timestamp"] = list(predict_timestamp.values)
        if max_duration is not None:
            fields["max_duration"] = str(max_duration)
        values = (timestamp or Timestamp()).values
        previous = None if previous_timestamp is None else previous_timestamp.values
        body = EventBody(PROTOCOL_VERSION, attempt, seq, seq, time_ns, values, previous, fields, {})
        made = cls(Event(event), run_name, rank, body)
        if on_command is not None:
            made.bind(lambda _, command: on_command(command.name, command.arguments))
        return made

    def bind(self, send: "CommandSender", fetch: "Fetch | None" = None) -> None:
        """Set the receiver of commands, and the source of tensors on other machines.

        Without it, as in a replay, commands have no effect."""
        _set_send(self, send)
        _set_fetch(self, fetch)

    def release(self) -> None:
        """Return borrowed memory of tensors. Views of them become invalid."""
        if self._opened is not None:
            for tensors in self._opened.values():
                tensors.close()
            _set_opened(self, None)

    @property
    def is_borrowed(self) -> bool:
        """The snapshot has tensors in memory that the trainer lends until the event is handled."""
        fields = self.fields
        return any(isinstance(value := fields.get(name), dict) and "segment" in value for name in self.on_demand)

    def stop_training(self, reason: str | None = None) -> None:
        """Ask the trainer to end the training.

        It ends at the first boundary after it receives the request, usually the end of a batch. That can be some
        batches after this event, unless the trainer waits for decisions (``Trainer(wait_for=...)``). The snapshot does
        not change. In a replay the request has no effect: the ending is in the recording.

        Args:
            reason: A few words, such as ``accuracy not better than 0.99 for 2 epochs``, by default the callback's name.
                The trainer's output, ``offloop show`` and dashboards show it.
        """
        self.send_command("stop", reason=reason)

    def send_command(self, name: str, *arguments: Any, reason: str | None = None) -> None:
        """Send the trainer a command: ``stop``, ``checkpoint``, ``pause``, ``resume``, or ``set`` with name and value.

        Effect and ``reason`` are as for :meth:`stop_training`. An unknown command raises ConfigurationError."""
        command = check_command(name, arguments, reason)
        if self._send is not None:
            self._send(self, command)

    @property
    def attempt(self) -> int:
        """Number of the run's attempt, from 1."""
        return self._body.attempt

    @property
    def seq(self) -> int:
        """Number of the event in this run, attempt and rank, from 1."""
        return self._body.seq

    @property
    def base_seq(self) -> int:
        """Number of base events in this run, attempt and rank so far, this one included if it is one."""
        return self._body.base_seq

    @property
    def time_ns(self) -> int:
        """Time of the event, in nanoseconds since 1970 (UTC). Never decreases within a rank."""
        return self._body.time

    @property
    def time(self) -> float:
        """Time of the event, in seconds since 1970 (UTC)."""
        return self._body.time / 10**9  # a quotient of integers is rounded once, of floats twice

    @property
    def timestamp(self) -> Timestamp:
        """Training time at the event."""
        timestamp = _new_timestamp(Timestamp)
        timestamp.values = self._body.timestamp
        return timestamp

    @property
    def previous_timestamp(self) -> Timestamp | None:
        """Training time before the last batch, epoch or iteration ended. ``None`` before the first."""
        previous = self._body.previous
        return None if previous is None else Timestamp.from_values(previous)

    @property
    def eval_timestamp(self) -> Timestamp:
        """Time within the current evaluation, or the last one."""
        return self._training_time("eval_timestamp")

    @property
    def predict_timestamp(self) -> Timestamp:
        """Time within the current prediction, or the last one."""
        return self._training_time("predict_timestamp")

    @property
    def max_duration(self) -> Time | None:
        """Planned length of the training, if known."""
        text = self.get("max_duration", None)
        return None if text is None else Time.from_timestring(str(text))

    @property
    def planned_duration(self) -> Time | None:
        """``max_duration`` before a stop shortened the training."""
        text = self.get("planned_duration", None)
        return self.max_duration if text is None else Time.from_timestring(str(text))

    @property
    def loss(self) -> float | None:
        """Training loss of the last batch. ``None`` before the first."""
        loss: float | None = self.get("loss", None)
        return loss

    @property
    def lr(self) -> Mapping[str, list[float]]:
        """Learning rates: optimizer name to one rate for each parameter group."""
        return self._map("lr")

    @property
    def batch_size(self) -> int | None:
        """Samples in the current batch. ``None`` before the first."""
        size: int | None = self.get("batch_size", None)
        return size

    @property
    def dataloader_label(self) -> str | None:
        """Label of the current dataloader: ``train``, or an evaluator's label."""
        label: str | None = self.get("dataloader_label", None)
        return label

    @property
    def dataloader_len(self) -> int | None:
        """Number of batches in the current dataloader, if it has a length."""
        length: int | None = self.get("dataloader_len", None)
        return length

    @property
    def losses(self) -> Mapping[str, float]:
        """Parts of the last batch's training loss by name. Empty if the loss is a single number."""
        return self._map("losses")

    @property
    def train_metrics(self) -> Mapping[str, Any]:
        """Training metrics by name."""
        return self._map("train_metrics")

    @property
    def eval_metrics(self) -> Mapping[str, Mapping[str, Any]]:
        """Evaluation metrics by evaluator label and name."""
        return self._map("eval_metrics")

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        size: int = self.get("world_size", 1)
        return size

    @property
    def fields(self) -> Mapping[str, Any]:
        """All published fields by name, as they were sent."""
        return MappingProxyType({**self._body.context, **self._body.fields})

    @property
    def on_demand(self) -> tuple[str, ...]:
        """Names of fields that were published because a consumer requested them."""
        names = self._body.fields.get("on_demand")
        return tuple(name for name in names if isinstance(name, str)) if isinstance(names, list) else ()

    def without(self, names: Collection[str]) -> "Snapshot":
        """Return the snapshot without some of its requested fields."""
        fields = {name: value for name, value in self._body.fields.items() if name not in names}
        on_demand = [name for name in self.on_demand if name not in names]
        if on_demand:
            fields["on_demand"] = on_demand
        else:
            fields.pop("on_demand", None)
        rest = Snapshot(self.event, self.run_name, self.rank, msgspec.structs.replace(self._body, fields=fields))
        if self._send is not None:
            rest.bind(self._send, self._fetch)
        return rest

    def get_elapsed_duration(self) -> Time | None:
        """Return the elapsed share of ``max_duration``, in the unit ``dur``, from 0 to 1, if there is a maximum."""
        max_duration = self.max_duration
        if max_duration is None:
            return None
        if not max_duration.value:
            return Time(1.0, TimeUnit.DURATION)
        elapsed: Time = self.timestamp.get(max_duration.unit) / max_duration
        return elapsed

    def get(self, name: str, default: Any = None) -> Any:
        """Return a published field as it was sent, or ``default``."""
        body = self._body
        fields = body.fields
        if name in fields:
            return fields[name]
        # Nearly always decoded already: the property takes longer than all the rest.
        context = body.context_ if type(body.context_) is dict else body.context
        return context.get(name, default)

    def _training_time(self, name: str) -> Timestamp:
        values = self.get(name, None)
        if values is None:
            return Timestamp()
        try:
            return Timestamp.from_values(msgspec.convert(values, TrainingTime))
        except msgspec.ValidationError as error:
            raise ProtocolError(f"the {self.event.value} snapshot's {name} is not 14 integers: {error}") from None

    def _map(self, name: str) -> Mapping[str, Any]:
        value = self.get(name, {})
        if not isinstance(value, dict):
            raise ProtocolError(f"the {self.event.value} snapshot's {name} is a {type(value).__name__}, not a map")
        return MappingProxyType(value)

    def __getattr__(self, name: str) -> Any:
        body: EventBody = object.__getattribute__(self, "_body")
        if name in body.fields:
            value = body.fields[name]
            return self._tensors(name, value) if is_tensors(value) else value
        if name in body.context:
            return body.context[name]
        not_sent = body.fields.get("not_sent")
        if isinstance(not_sent, str) and any(part.startswith(f"{name}:") for part in not_sent.split("; ")):
            raise FieldNotAvailableError(
                f"the {self.event.value} snapshot has no {name!r}, the trainer has left it out: {not_sent}", field=name
            )
        carried = ", ".join(sorted(map(str, {*body.fields, *body.context}))) or "no fields"
        raise FieldNotAvailableError(
            f"the {self.event.value} snapshot has no field {name!r}; it carries {carried}; "
            f"a callback requests it with fields = ({name!r},), a loop of your own sends it with "
            f"publisher.publish(event, {name}=...)",
            field=name,
        )

    def _tensors(self, name: str, value: dict[str, Any]) -> Tensors:
        if self._opened is None:
            _set_opened(self, {})
        assert self._opened is not None  # set above
        if name not in self._opened:
            self._opened[name] = open_tensors(value, self._fetch)
        return self._opened[name]

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise FrozenSnapshotError(
            f"a snapshot is read-only: {name!r} cannot be assigned; "
            "use an Algorithm in the trainer to change the training",
            field=name,
        )

    def __delattr__(self, name: str) -> NoReturn:
        raise FrozenSnapshotError(f"a snapshot is read-only: {name!r} cannot be deleted", field=name)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Snapshot):
            return NotImplemented
        return (self.event, self.run_name, self.rank, self._body) == (
            other.event,
            other.run_name,
            other.rank,
            other._body,
        )

    def __hash__(self) -> int:
        return hash((self.event, self.run_name, self.rank, self._body.attempt, self._body.seq))

    def __reduce__(self) -> tuple[Any, ...]:
        return Snapshot, (self.event, self.run_name, self.rank, self._body)

    def __repr__(self) -> str:
        body = self._body
        epoch, batch = body.timestamp.epoch, body.timestamp.batch
        return (
            f"<Snapshot {self.event.value} of {self.run_name}, rank {self.rank}, seq {body.seq}: {epoch}ep {batch}ba>"
        )


# These bypass Snapshot.__setattr__.
_set_send, _set_fetch, _set_opened = (vars(Snapshot)[name].__set__ for name in ("_send", "_fetch", "_opened"))

"""A callback of another framework as one of ours: what the adapters of all frameworks have in common."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, NoReturn, TypeVar

from offloop.bus.errors import ConfigurationError, FieldNotAvailableError
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.types.demand import BASE_EVENTS
from offloop.bus.types.event import Event
from offloop.bus.types.hyperparameters import hyperparameters_in
from offloop.bus.types.time import TimeUnit
from offloop.consumers.api.callback import Callback, CannotWorkError, MaybeAwaitable
from offloop.consumers.api.logger import Logger

T = TypeVar("T")

IN_TRAINING = "run it in the training"
SAVES = "the callback 'checkpoint' saves the training"
"""What to do instead of what a consumer cannot run."""

_DURING_EVALUATION = {event for event in Event if event.value.startswith("eval_") and event is not Event.EVAL_AFTER_ALL}
_BEFORE_TRAINING = {Event.INIT, Event.BEFORE_LOAD, Event.AFTER_LOAD}
_EVALUATORS = ("eval", "val", "valid", "validation")
_METRIC = "metrics/train/"
"""What adapters put before the names of their framework's metrics."""
_PLAIN = (bool, int, float, str, type(None))
_TENSOR = "offloop:tensor"


class Adapter(Callback):
    """A callback of another framework as one of ours. Its ``fields``, ``every``, ``background`` and ``barrier_events``
    count if it has them."""

    def __init__(self, callback: Any) -> None:
        self.callback = callback
        for name in ("fields", "every", "background", "barrier_events"):
            if hasattr(callback, name):
                setattr(self, name, getattr(callback, name))

    @property
    def shown_as(self) -> str:
        """What people know it as: its own class."""
        return type(self.callback).__name__


def adapted_class(
    theirs: type[Any], base: type[T], importing: Callable[[], AbstractContextManager[None]] = nullcontext
) -> type[T]:
    """A subclass of ``base``, an adapter, with the name, the documentation and the options of a class of theirs, and
    beside these what the adapter's constructor takes after the object.

    ``importing`` surrounds the making of their object."""
    own = list(inspect.signature(base.__init__).parameters.values())[2:]
    signature = inspect.signature(theirs.__init__)
    named = [one for one in signature.parameters.values() if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]

    @functools.wraps(theirs.__init__)
    def make(self: Any, *arguments: Any, **options: Any) -> None:
        ours = {one.name: options.pop(one.name) for one in own if one.name in options}
        with importing():
            made = theirs(*arguments, **options)
        base.__init__(self, made, **ours)  # type: ignore[call-arg]

    make.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*named, *(one.replace(kind=one.KEYWORD_ONLY) for one in own)]
    )
    make.__annotations__ = {**make.__annotations__, **{one.name: one.annotation for one in own}}
    members = {"__init__": make, "__module__": theirs.__module__, "__doc__": inspect.getdoc(theirs)}
    return type(theirs.__name__, (base,), members)


def root_of(theirs: type[Any], roots: Mapping[str, str]) -> type[Any] | None:
    """The base class of theirs, of those that ``roots`` names by their packages. It is found by its name, so that no
    framework is imported."""
    for base in theirs.__mro__:
        if roots.get(base.__module__.partition(".")[0]) == base.__name__:
            return base
    return None


class Unavailable:
    """Stands where their callbacks expect what only the training's process has, and says so at the first touch. To
    ``hasattr`` it has nothing."""

    def __init__(self, name: str, who: str, there: str) -> None:
        vars(self).update(_name=name, _who=who, _there=there)

    def _refuse(self, what: str) -> NoReturn:
        name = vars(self)["_name"]
        raise FieldNotAvailableError(
            f"{vars(self)['_who']} uses {name}{what}, which a consumer does not have: {vars(self)['_there']}; run this "
            "callback in the training",
            field=name,
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse(f".{name}")

    def __setattr__(self, name: str, value: Any) -> None:
        # What a property of the class takes is for the property.
        if isinstance(getattr(type(self), name, None), property):
            object.__setattr__(self, name, value)
        else:
            self._refuse(f".{name}")

    def __getitem__(self, key: Any) -> Any:
        self._refuse(f"[{key!r}]")

    def __iter__(self) -> Any:
        self._refuse("")

    def __call__(self, *_: Any, **__: Any) -> Any:
        self._refuse("()")


class TrainingAdapter(Adapter):
    """For callbacks of frameworks whose methods are given the training itself, or objects of it: they get objects with
    what a snapshot has, and :class:`Unavailable` ones for the rest.

    An adapter has a method for each event of ours that concerns it, and calls their methods there with :meth:`call`.
    :meth:`epoch_ended` and :meth:`evaluated` come where most frameworks have them: an epoch ends after the evaluation
    that belongs to it, and an evaluation once, after its last evaluator. In a consumer that starts in the middle of a
    training, because it continues, :meth:`begin` comes before the first event.
    """

    framework: ClassVar[str]
    """What people call the framework."""

    roots: ClassVar[Mapping[str, str]]
    """The base class of their callbacks, by the package that it is from."""

    relatives: ClassVar[Sequence[str]] = ()
    """Further packages with callbacks of that kind."""

    methods: ClassVar[Mapping[str, Event | None]]
    """Their methods that a consumer calls, and for those that need an event that is not always published, which."""

    refused: ClassVar[Mapping[str, str]]
    """Their classes that need the training's process, by name, and what to use instead."""

    before_label: ClassVar[str] = ""
    """What names of metrics have before the label of an evaluator."""

    def __init__(self, callback: Any) -> None:
        super().__init__(callback)
        self.root = self.check_class(type(callback))
        """The base class that the callback's has of the framework."""
        if not any(self.overrides(name) for name in self.methods):
            raise ConfigurationError(
                f"{self.shown_as} has none of the methods of {self.framework}'s callbacks that a consumer calls: "
                f"{', '.join(self.methods)}"
            )
        if not hasattr(callback, "barrier_events"):
            # Where such callbacks decide, for trainings that wait for them.
            self.barrier_events = (  # type: ignore[misc]  # an object's own
                Event.EPOCH_END,
                Event.EPOCH_CHECKPOINT,
                Event.EVAL_END,
                Event.EVAL_AFTER_ALL,
            )
        self.snapshot: Snapshot
        self.logger: Logger
        self.epoch = 0
        """Epochs that were complete at what they are called for."""
        self.step = 0
        """Batches that were trained then."""
        self.hyperparameters: dict[str, Any] = {}
        self.memory: dict[str, Any] = {}
        """What has to be known from one event to the next: plain values."""
        self._has_begun = False
        self.restored: dict[str, Any] = {}
        """What :meth:`load_state_dict` gave, until the callback has begun."""

    @classmethod
    def check_class(cls, theirs: type[Any]) -> type[Any]:
        """The base class that a class of theirs has of the framework.

        Raises :class:`offloop.bus.errors.ConfigurationError` for one that has none, or needs more than a consumer
        has."""
        root = root_of(theirs, cls.roots)
        if root is None:
            raise ConfigurationError(
                f"{theirs.__name__} is not a callback of {cls.framework}: its class has to inherit from one of "
                f"{', '.join(f'{package}...{name}' for package, name in cls.roots.items())}"
            )
        for base in theirs.__mro__:
            if base.__name__ in cls.refused and base.__module__.partition(".")[0] in {*cls.roots, *cls.relatives}:
                raise ConfigurationError(
                    f"{theirs.__name__} cannot run in a consumer, which has neither the model nor the optimizer: "
                    f"{cls.refused[base.__name__]}",
                    name=theirs.__name__,
                )
        return root

    def wanted_events(self) -> set[Event]:
        """All that is published in any case, and the events of methods that it overrides."""
        further = {event for name, event in self.methods.items() if event is not None and self.overrides(name)}
        return {*BASE_EVENTS, *further}

    def overrides(self, name: str) -> bool:
        """Whether the callback has a method of its own under that name of theirs."""
        theirs = type(self.callback)
        return name in vars(self.callback) or getattr(theirs, name, None) is not getattr(self.root, name, None)

    def run_event(self, event: Event, state: Snapshot, logger: Logger) -> MaybeAwaitable:
        """Has the callback see the event in the order of its framework."""
        self.snapshot, self.logger = state, logger
        self.hyperparameters |= hyperparameters_in(state.fields)
        if state.dataloader_label == "train" and state.dataloader_len:
            self.memory["length"] = state.dataloader_len
        if event in _BEFORE_TRAINING:
            return None
        try:
            if event is Event.FIT_START or not self._has_begun:
                self._begin()
            if values := _logged(state):
                self.take_logged(values)
            if event not in _DURING_EVALUATION:
                self._settle()
            self._place(state.timestamp.values.epoch, state.timestamp.values.batch)
            return super().run_event(event, state, logger)
        except FieldNotAvailableError as error:
            raise CannotWorkError(str(error)) from error

    def close(self, state: Snapshot, logger: Logger) -> None:
        """Has it see what was kept back for an event that does not come."""
        if self._has_begun:
            self._settle()

    def eval_end(self, state: Snapshot, logger: Logger) -> None:
        """An evaluator is through, maybe not the last one."""
        self.memory["evaluated"] = [self.epoch, self.step]
        self.memory["evaluated_at"] = self.step

    def epoch_end(self, state: Snapshot, logger: Logger) -> None:
        """The epoch is trained; the evaluation that belongs to it may still come."""
        self.memory["ended"] = [self.epoch, self.step]
        if self.memory.get("evaluated_at") == self.step:
            self._settle()

    def begin(self) -> None:
        """The training begins, or the callback gets to see it from here on."""

    def take_logged(self, values: dict[str, float]) -> None:
        """The training has logged this by itself since the event before: metrics of a framework, and what its users
        log, by their own names."""

    def evaluated(self) -> None:
        """An evaluation is through, with all of its evaluators."""

    def epoch_ended(self) -> None:
        """An epoch is through, with its evaluation; :attr:`epoch` counts it already."""

    def send_commands(self) -> None:
        """Sends what the callback has asked of the training, in the way of its framework."""

    def call(self, name: str, *arguments: Any) -> None:
        """Calls a method of the callback, and passes on what it asks of the training."""
        getattr(self.callback, name)(*arguments)
        self.send_commands()

    def stop(self, reason: str) -> None:
        """Asks for the end of the training, once."""
        if not self.memory.get("stopped"):
            self.memory["stopped"] = True
            self.snapshot.stop_training(f"{self.shown_as}: {reason}")

    def missing(self, name: str, there: str) -> Unavailable:
        """Something that a consumer lacks; ``there`` says what it has instead."""
        return Unavailable(name, self.shown_as, there)

    def metrics(self, prefix: str) -> dict[str, Any]:
        """What the evaluator has found that has just ended, by names that begin with the framework's prefix, or with
        the evaluator's label where that has a name of its own."""
        label = self.snapshot.dataloader_label or prefix
        start = f"{prefix if label in _EVALUATORS else self.before_label + label}_"
        found = self.snapshot.eval_metrics.get(label, {})
        return {name if name.startswith(start) else start + name: found[name] for name in numbers(found)}

    @property
    def max_epochs(self) -> int | None:
        """Epochs that the training is to last, if it is measured in them."""
        longest = self.snapshot.planned_duration
        return int(longest.value) if longest is not None and longest.unit == TimeUnit.EPOCH else None

    @property
    def max_steps(self) -> int | None:
        """Batches that the training is to last, if that is known."""
        longest, length = self.snapshot.planned_duration, self.memory.get("length")
        if longest is not None and longest.unit == TimeUnit.BATCH:
            return int(longest.value)
        return None if self.max_epochs is None or length is None else self.max_epochs * length

    def state_dict(self) -> dict[str, Any]:
        """What the callback gives, or else its plain attributes; and what the adapter knows."""
        theirs = self.callback.state_dict() if hasattr(self.callback, "state_dict") else {}
        return {
            "callback": _packed(self.restored or theirs or vars(self.callback)),
            "adapter": _packed(self.memory),
            "hyperparameters": _packed(self.hyperparameters),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes it up; the callback does when it has seen the training begin, as in its framework."""
        self.restored = _unpack(state["callback"])
        self.memory, self.hyperparameters = _unpack(state["adapter"]), _unpack(state["hyperparameters"])
        self._has_begun = False

    def _begin(self) -> None:
        if self._has_begun:
            # A further training of the same process.
            self.memory = {name: value for name, value in self.memory.items() if name == "length"}
        self._has_begun = True
        self._place(self.snapshot.timestamp.values.epoch, self.snapshot.timestamp.values.batch)
        self.begin()
        if self.restored and hasattr(self.callback, "load_state_dict"):
            self.callback.load_state_dict(self.restored)
        else:
            vars(self.callback).update(self.restored)
        self.restored = {}

    def _settle(self) -> None:
        for name, notify in (("evaluated", self.evaluated), ("ended", self.epoch_ended)):
            if name in self.memory:
                self._place(*self.memory[name])
                try:
                    notify()
                finally:
                    del self.memory[name]

    def _place(self, epoch: int, batch: int) -> None:
        self.epoch, self.step = epoch, batch


def _logged(state: Snapshot) -> dict[str, float]:
    logged = [values for _, values in state.fields.get("logged") or ()]
    return {name.removeprefix(_METRIC): value for values in logged for name, value in numbers(values).items()}


def numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Those values that are numbers."""
    return {str(name): value for name, value in values.items() if isinstance(value, int | float)}


def _packed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Those values that can be stored."""
    packed = {}
    for name, value in values.items():
        with contextlib.suppress(TypeError):
            packed[name] = _pack(value)
    return packed


def _pack(value: Any) -> Any:
    """A value that can be stored: a plain one, a list or a map of such, or the number in a tensor of one element.

    Raises TypeError for any other."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, dict) and all(type(name) is str for name in value):
        return {name: _pack(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_pack(part) for part in value]
    if type(value).__name__ == "Tensor" and value.numel() == 1:
        return {_TENSOR: value.item()}
    raise TypeError


def _unpack(value: Any) -> Any:
    if isinstance(value, dict) and _TENSOR in value:
        import torch

        return torch.tensor(value[_TENSOR])
    if isinstance(value, dict):
        return {name: _unpack(part) for name, part in value.items()}
    return [_unpack(part) for part in value] if isinstance(value, list) else value

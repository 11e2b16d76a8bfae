"""The logger between callbacks, which decide what is logged, and destinations, which decide where it goes."""

import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from offloop.bus.errors import ConfigurationError, require
from offloop.bus.protocol.order import CheckpointMark
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.types.commands import Outcome
from offloop.bus.types.source import Source
from offloop.consumers.api.images import as_images, as_masks
from offloop.consumers.api.optional import np

LogValue: TypeAlias = float | int | str | bool
"""The value of a metric as destinations receive it."""

_RESERVED = ("step", "time")
_PLAIN = frozenset({float, int, bool})
_DEEPEST = 8
_new_tuple = tuple.__new__
_LARGEST = 2**63 - 1
_LARGEST_STEP = 2**53 - 1


class Row(NamedTuple):
    """Metrics that were logged for one step during one event."""

    step: int
    """Batches trained, unless the callback gave another step."""
    time: float
    """Time of the event: seconds since 1970, UTC."""
    metrics: dict[str, LogValue]
    """By name, in the order of the calls; of a name logged twice, the later value in the earlier place."""


class Images(NamedTuple):
    """Images that belong together, such as the inputs of a batch."""

    step: int
    time: float
    name: str
    images: "list[np.ndarray[Any, Any]]"
    """Each of height, width and channels (1, 3 or 4), as bytes or as floats as they were logged."""
    masks: "dict[str, list[np.ndarray[Any, Any]]]"
    """Name of a mask to one array of class numbers (height, width) for each image."""
    mask_class_labels: dict[int, str] | None
    """Names of the class numbers."""
    use_table: bool
    """Prefer a table of images to a plain list, where a destination has both."""


class Table(NamedTuple):
    step: int
    time: float
    name: str
    columns: list[str]
    rows: list[list[LogValue | None]]
    """Each with one cell for each column."""


class Histogram(NamedTuple):
    step: int
    time: float
    name: str
    counts: list[int]
    edges: list[float]
    """Ascending, one more than counts."""


class Text(NamedTuple):
    """A text for people."""

    step: int
    time: float
    name: str
    text: str


class Upload(NamedTuple):
    """A file to keep with the run."""

    remote_file_name: str
    """Its name at the destination; parts are separated by slashes."""
    file_path: Path
    overwrite: bool
    """Replace a file of that name."""


Entry: TypeAlias = Images | Table | Histogram | Text | Upload
"""Everything but metrics and hyperparameters."""


class NonMetrics(NamedTuple):
    """Everything but metrics that was logged during one event."""

    entries: list[Entry]
    """In the order of the calls."""
    hyperparameters: dict[str, Any]
    """Logged by callbacks."""
    of_run: dict[str, Any]
    """Reported by the run itself."""


@dataclass(frozen=True)
class RunContext:
    """The observed run, and the place of its files."""

    run_name: str
    attempt: int
    """Number of the attempt, from 1."""
    run_dir: Path | None
    """``None`` for a stream that has no directory, such as a list of snapshots."""
    command: Callable[..., Outcome] | None = field(default=None, compare=False)
    """Sends the run a command, ``command("set", "lr", 0.1)``, and waits some seconds for its outcome.

    ``None`` for a recording. This and the functions below may be called from any thread."""
    answered: Callable[[], Sequence[Outcome]] = field(default=tuple, compare=False)
    """The answered commands of all senders, in order, as far as the stream was read."""
    run_id: str | None = None
    """The run's identity, see :attr:`offloop.bus.RunInfo.id`; ``None`` if unknown."""
    checkpoints: Callable[[], Sequence[CheckpointMark]] = field(default=tuple, compare=False)
    """The saved and loaded checkpoints, in order, as far as the stream was read."""
    source: Callable[[], Source] = field(default=Source, compare=False)
    """The source of the run's events, as far as the stream was read."""

    @property
    def identity(self) -> str:
        """Its id, or its name without one: for servers, where runs of several folders meet."""
        return self.run_id or self.run_name

    @property
    def unique_name(self) -> str:
        """The name with the start of the id, for people."""
        return self.run_name if self.run_id is None else f"{self.run_name}-{self.run_id[:6]}"


class LoggerDestination:
    """A place for logged values: a file, a terminal, another system. Override the methods that you need.

    The constructor only takes options: it runs before the run is known, and in the trainer's process when the
    destination is given to a ``Trainer``. Open files and connections in :meth:`open`. Use no clock: equal streams
    are to give equal output."""

    max_delay: float | None = None
    """Seconds by which its values may be late, as for :attr:`offloop.consumers.Callback.max_delay`."""

    background: bool = False
    """For a slow or unreachable destination, such as a server.

    A thread feeds it from a :class:`~offloop.consumers.delivery.spool.Spool`, so it delays no callback. After an
    error it is closed, opened again after a pause, and given the same values again: it has to find out which have
    arrived. :meth:`load_state_dict` is called before each :meth:`open` but the first. A
    :class:`~offloop.bus.errors.ConfigurationError` before anything was sent ends the attempts."""

    writes_to_terminal: bool = False
    """It writes to the terminal, so it is refused beside a callback that draws on the whole terminal."""

    acknowledges: bool = True
    """With ``background``: values are safe when a method returns, and not only when :meth:`close` returns.

    Otherwise it may be given everything since it was opened again."""

    drain_seconds: float = 30.0
    """With ``background``: seconds that the consumer waits at its end while nothing can be sent."""

    finish_seconds: float = 0.0
    """As :attr:`drain_seconds`, for a file, the images of an event, and :meth:`close`."""

    requires: tuple[str, str] | None = None
    """The extra of offloop and the module that it needs, such as ``("mlflow", "mlflow")``, for :meth:`check`."""

    problem: str | None = None
    """Missing output, in words that follow the name, known after ``close``; ``None`` if complete."""

    where: str | None = None
    """A path, an address, or a command to look at its output, shown at the consumer's end.

    Known once it was opened; ``None`` for nothing."""

    def check(self) -> None:
        """Raise :class:`offloop.bus.errors.ConfigurationError` for what cannot work, such as a missing package.

        Called in the process and thread of the consumer, before :meth:`open`."""
        if self.requires is not None:
            require(f"logger {self.requires[0]}", *self.requires)

    def open(self, context: RunContext) -> None:
        """Open files and connections, once, before the first event. Raise ConfigurationError if that fails."""

    def log_rows(self, rows: Sequence[Row], state: Snapshot) -> None:
        """Receive everything that was logged during one event: a row for each step, in the order of first use.

        Called after all callbacks have handled the event; ``state`` is the event's snapshot."""

    def log_hyperparameters(self, hyperparameters: Mapping[str, Any], state: Snapshot) -> None:
        """Receive values that describe the run as a whole, from callbacks and from the run itself."""

    def log_entry(self, entry: Entry, state: Snapshot) -> None:
        """Receive an entry of any kind; calls the method of its kind."""
        match entry:
            case Images():
                self.log_images(entry, state)
            case Table():
                self.log_table(entry, state)
            case Histogram():
                self.log_histogram(entry, state)
            case Text():
                self.log_text(entry, state)
            case Upload():
                self.upload_file(entry, state)

    def log_images(self, entry: Images, state: Snapshot) -> None:
        """Receive images."""

    def log_table(self, entry: Table, state: Snapshot) -> None:
        """Receive a table."""

    def log_histogram(self, entry: Histogram, state: Snapshot) -> None:
        """Receive a histogram."""

    def log_text(self, entry: Text, state: Snapshot) -> None:
        """Receive a text."""

    def upload_file(self, entry: Upload, state: Snapshot) -> None:
        """Receive a file; it is there until this returns."""

    def flush(self) -> None:
        """Write out buffered values.

        Called when no more events are ready, at least every 50 ms while some are, and before :meth:`close`; not
        called with ``background``."""

    def on_commit(self) -> None:
        """Confirm entries, which do not come again: the last :meth:`state_dict` is stored, or the run has finished.

        Never called where nothing is stored."""

    def on_abandon(self) -> None:
        """Discard pending output: the run has finished, but nothing is committed, because another destination failed.

        Everything comes again if this consumer is restarted."""

    def close(self) -> None:
        """Close files and connections, once, after every callback is closed; also when the consumer is interrupted."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position for :meth:`load_state_dict`.

        Plain values only: numbers, strings, bytes, lists, maps, ``None``. Called between two events and stored
        next: when it returns, everything before it has to be safe, such as synced to the disk."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Return to the state of :meth:`state_dict`; its tuples are lists now.

        Called before :meth:`open` by a consumer that resumes. Remove output after that position:
        those events come again."""


class Logger:
    """Gathers what callbacks log during an event, then passes it to the destinations. For one thread."""

    def __init__(self, context: RunContext | None = None) -> None:
        self.context: RunContext = context or RunContext("run", 1, None)
        """The observed run."""
        self._now: int | None = None  # batches trained at the current event
        # The metrics for that step, as long as none were logged for another one; then those for all steps, in order.
        self._row: dict[str, LogValue] | None = None
        self._rows: dict[int, dict[str, LogValue]] = {}
        self._entries: list[Entry] = []
        self._hyperparameters: dict[str, Any] = {}
        self._of_run: dict[str, Any] = {}

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log metrics for a step, by default ``state.timestamp.batch`` of the current event.

        Values are numbers, strings or objects of one value with ``item()``, such as a tensor of one element.

        Raises ConfigurationError: a value of another kind, an invalid step, a name that is not text, or a metric named
        ``step`` or ``time``."""
        if not _PLAIN.issuperset(map(type, metrics.values())) or not _are_plain(metrics):
            metrics = {_metric_name(name): _plain(f"metric {name!r} has a value", one) for name, one in metrics.items()}
        if not metrics:
            return
        if step is None and self._row is not None:
            self._row.update(metrics)
        elif step is None and self._now is not None and not self._rows:
            self._row = dict(metrics)
        else:
            self._log_for_step(metrics, self._step("log_metrics", step))

    def log_hyperparameters(self, hyperparameters: Mapping[str, Any]) -> None:
        """Log values that describe the run as a whole; they replace the run's own values of the same names.

        Numbers, texts, booleans, ``None``, and lists and maps of these stay as they are; others are logged as
        their texts."""
        self._hyperparameters |= {str(name): _as_plain(value) for name, value in hyperparameters.items()}

    def log_images(
        self,
        images: Any,
        name: str = "Images",
        channels_last: bool = False,
        step: int | None = None,
        masks: Mapping[str, Any] | None = None,
        mask_class_labels: Mapping[int, str] | None = None,
        use_table: bool = True,
    ) -> None:
        """Log images: tensors or arrays, copied at once.

        Args:
            images: one of 2 or 3 dimensions, several as 4 dimensions or as a sequence. Whole numbers are
                from 0 to 255; floats stay as they are.
            name: the title of the images.
            channels_last: the channels (1, 3 or 4) are the last dimension of an image, not the first.
            step: as for :meth:`log_metrics`.
            masks: for segmentation: name of a mask, such as ``prediction``, to one mask of class numbers
                (height, width) for each image.
            mask_class_labels: names of the class numbers.
            use_table: make a table of images, where a destination has tables.

        Raises:
            ConfigurationError: not the shape or type of an image, or masks that do not fit the images.
        """
        step = self._step("log_images", step)
        converted = as_images(name, images, channels_last)
        converted_masks = {mask: as_masks(name, mask, values, converted) for mask, values in (masks or {}).items()}
        labels = (
            None if mask_class_labels is None else {int(key): str(label) for key, label in mask_class_labels.items()}
        )
        self._entries.append(Images(step, 0.0, _encodable(name), converted, converted_masks, labels, use_table))

    def log_table(
        self, columns: Sequence[str], rows: Iterable[Sequence[Any]], name: str = "Table", step: int | None = None
    ) -> None:
        """Log a table; cells are values as for :meth:`log_metrics`, or ``None``.

        Raises ConfigurationError: a row with more or fewer cells than columns, or a cell of another kind."""
        names = [_encodable(column) for column in columns]
        cells = [[_cell(name, cell) for cell in row] for row in rows]
        for number, row in enumerate(cells, 1):
            if len(row) != len(names):
                raise ConfigurationError(
                    f"row {number} of table {name!r} has {len(row)} cells for {len(names)} columns: give one for each"
                )
        self._entries.append(Table(self._step("log_table", step), 0.0, _encodable(name), names, cells))

    def log_histogram(
        self, counts: Sequence[int], edges: Sequence[float], name: str = "Histogram", step: int | None = None
    ) -> None:
        """Log the numbers of values between ascending edges, of which there is one more.

        Raises ConfigurationError: another number of edges."""
        if len(edges) != len(counts) + 1:
            raise ConfigurationError(
                f"histogram {name!r} has {len(edges)} edges for {len(counts)} counts: give one more edge than counts"
            )
        self._entries.append(Histogram(self._step("log_histogram", step), 0.0, _encodable(name), [*counts], [*edges]))

    def log_text(self, text: str, name: str = "Text", step: int | None = None) -> None:
        """Log a text for people. Raises ConfigurationError: not a string."""
        if not isinstance(text, str):
            raise ConfigurationError(f"text {name!r} is of type {type(text).__name__}: log a string")
        self._entries.append(Text(self._step("log_text", step), 0.0, _encodable(name), _encodable(text)))

    def upload_file(self, remote_file_name: str, file_path: str | Path, overwrite: bool = False) -> None:
        """Pass a file to every destination that keeps files, under ``remote_file_name``.

        Afterwards it may be deleted or replaced, but not changed in place.

        Raises ConfigurationError: the file does not exist."""
        path = Path(file_path).absolute()
        if not path.is_file():
            raise ConfigurationError(f"{path} is not a file: give upload_file() an existing file")
        self._entries.append(Upload(_encodable(remote_file_name), path, overwrite))

    def begin(self, state: Snapshot) -> None:
        if self._row is not None:
            self._keep_row()
        self._now = state._body.timestamp.batch

    @property
    def pending(self) -> bool:
        """True while something is gathered that was not taken yet."""
        return bool(self._row or self._rows or self._entries or self._hyperparameters or self._of_run)

    def take_from_run(self, hyperparameters: Mapping[str, Any]) -> None:
        self._of_run.update(hyperparameters)

    def take_rows(self, state: Snapshot) -> list[Row]:
        """Return the gathered metrics, timed by ``state``, and start anew."""
        row, self._row = self._row, None
        if not self._rows:
            # A call of Row takes twice as long, at every event.
            return [] if row is None else [_new_tuple(Row, (self._now, state.time, row))]
        rows, self._rows = self._rows, {}
        return [Row(step, state.time, metrics) for step, metrics in rows.items()]

    def take_non_metrics(self, state: Snapshot) -> NonMetrics | None:
        """Return everything else that was gathered, timed by ``state``, and start anew; ``None`` for nothing."""
        if not (self._entries or self._hyperparameters or self._of_run):
            return None
        time = state.time
        entries = [entry if isinstance(entry, Upload) else entry._replace(time=time) for entry in self._entries]
        non_metrics = NonMetrics(entries, self._hyperparameters, self._of_run)
        self._entries, self._hyperparameters, self._of_run = [], {}, {}
        return non_metrics

    def _log_for_step(self, metrics: Mapping[str, Any], step: int) -> None:
        self._keep_row()
        self._rows.setdefault(step, {}).update(metrics)

    def _keep_row(self) -> None:
        row, self._row = self._row, None
        if row is not None and self._now is not None:
            self._rows[self._now] = row

    def _step(self, method: str, chosen: int | None) -> int:
        if chosen is not None:
            return _checked_step(chosen)
        if self._now is None:
            raise ConfigurationError(f"{method}() was called before the first event: pass step=... there")
        return self._now


def _are_plain(names: Iterable[Any]) -> bool:
    try:
        return "".join(names).isascii() and not any(reserved in names for reserved in _RESERVED)
    except TypeError:
        return False


def _metric_name(name: Any) -> str:
    if not isinstance(name, str):
        raise ConfigurationError(f"{repr(name)[:100]} cannot name a metric: use text, such as 'train/accuracy'")
    if name in _RESERVED:
        raise ConfigurationError(f"invalid name of a metric {name!r}: every row has it already, choose another name")
    return _encodable(name)


def _checked_step(step: Any) -> int:
    try:
        number = int(step)
    except (TypeError, ValueError, OverflowError):
        number = None
    if number is None or abs(number) > _LARGEST_STEP:
        raise ConfigurationError(f"step is {repr(step)[:100]}: use a whole number, such as the number of the batch")
    return number


def _encodable(text: Any) -> str:
    # Other text than UTF-8 cannot be written or sent.
    return str(text).encode(errors="backslashreplace").decode()


def _as_plain(value: Any, depth: int = 0) -> Any:
    if depth < _DEEPEST and isinstance(value, Mapping):
        return {str(name): _as_plain(part, depth + 1) for name, part in value.items()}
    if depth < _DEEPEST and isinstance(value, list | tuple):
        return [_as_plain(part, depth + 1) for part in value]
    if isinstance(value, numbers.Integral):
        value = value if isinstance(value, bool) else int(value)
        return value if abs(value) <= _LARGEST else hex(value)
    if isinstance(value, numbers.Real):
        return float(value)
    if value is None or isinstance(value, str):
        return value and _encodable(value)
    return str(value)


def _cell(name: str, value: Any) -> LogValue | None:
    return None if value is None else _plain(f"table {name!r} has a cell", value)


def _plain(what: str, value: Any) -> LogValue:
    if isinstance(value, float | int):
        return value
    if isinstance(value, str):
        return _encodable(value)
    try:
        item = value.item()
    except (AttributeError, TypeError, ValueError, RuntimeError):
        item = None
    if not isinstance(item, float | int | str):
        raise ConfigurationError(
            f"{what} of type {type(value).__name__}: log a number, a string or a tensor of one element"
        )
    return item

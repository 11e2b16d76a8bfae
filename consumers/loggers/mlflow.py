"""Logs to MLflow, https://mlflow.org/docs/latest."""

import contextlib
import os
import re
import shlex
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from offloop.bus.errors import ConfigurationError
from offloop.bus.lazy import LazyModule
from offloop.bus.printing import cut_at_end
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.strict_json import plain
from offloop.consumers.api.images import as_bytes, class_numbers
from offloop.consumers.api.logger import Images, LoggerDestination, Row, RunContext, Table, Text, Upload

mlflow: LazyModule = LazyModule("mlflow")
entities: LazyModule = LazyModule("mlflow.entities")
exceptions: LazyModule = LazyModule("mlflow.exceptions")

_TAG = "offloop.run"
_ID_TAG = "offloop.run_id"
_ATTEMPT_TAG = "offloop.attempt"
_EXPERIMENT = "offloop"
_MOST_METRICS = 1000
_MOST_PARAMS = 100
_LONGEST_PART = 200
_LONGEST_KEY = 250
_LONGEST_PARAM = 6000
# MLflow would try for minutes without a message: the spool tries again, with messages.
_TIMEOUT = "MLFLOW_HTTP_REQUEST_TIMEOUT"
_REQUEST_SECONDS = "20"
_ONE_ATTEMPT = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", _TIMEOUT: _REQUEST_SECONDS}
_NO_NAMES = ("", ".", "..")
_FORBIDDEN = re.compile(r"[^\w\-. :/]")


class MLFlowLogger(LoggerDestination):
    """Logs to an MLflow server or database: ``pip install 'offloop[mlflow]'``.

    All attempts of a run are one run there, found by its identity in the tag ``offloop.run_id``. Existing steps of a
    metric are not logged again.

    The run there lasts from the first to the last event with logged values. Metrics have the training's step and the
    event's time; texts are tags. Hyperparameters are params, cut at 6,000 characters; params cannot change, so a later
    value is a tag. Images are ``images/NAME/STEP-NUMBER.png`` with masks beside them, tables ``tables/NAME/STEP.json``
    in the form of ``mlflow.log_table``, texts ``texts/NAME/STEP.txt``, files artifacts of their names. Characters that
    MLflow does not allow in a name become ``_``.

    A request fails when the server does not answer for 20 seconds, that of a file for ``finish_seconds``, or both for
    ``$MLFLOW_HTTP_REQUEST_TIMEOUT``; everything that has not arrived is sent again after a pause.

    Args:
        experiment_name: the experiment, created if missing.
        run_name: the run's name there; by default its own.
        tracking_uri: the server or database, such as ``http://host:5000`` or ``sqlite:///mlflow.db``; by default
            ``$MLFLOW_TRACKING_URI``.
        artifact_location: where a new experiment keeps its artifacts; by default the server's choice.
        drain_seconds: how long the consumer waits at its end while nothing can be sent.
        finish_seconds: how long a file, or the images of an event, may take to arrive.
    """

    name: ClassVar[str] = "mlflow"
    requires: tuple[str, str] = ("mlflow", "mlflow")
    background = True

    def __init__(
        self,
        experiment_name: str = _EXPERIMENT,
        run_name: str | None = None,
        tracking_uri: str | None = None,
        artifact_location: str | None = None,
        drain_seconds: float = LoggerDestination.drain_seconds,
        finish_seconds: float = 600.0,
    ) -> None:
        self._experiment_name = experiment_name
        self._run_name = run_name
        self._tracking_uri = tracking_uri
        self._artifact_location = artifact_location
        self.drain_seconds = drain_seconds
        self.finish_seconds = finish_seconds
        self._client: Any = None
        self._experiment_id = ""
        self._context: RunContext | None = None
        self._run_id: str | None = None
        self._last_time: float | None = None
        self._params: dict[str, str] = {}
        self._known: dict[str, set[int] | None] = {}

    def open(self, context: RunContext) -> None:
        for name, value in _ONE_ATTEMPT.items():
            os.environ.setdefault(name, value)
        self._client = mlflow.MlflowClient(self._tracking_uri)
        uri = self._client.tracking_uri
        is_server = uri.startswith(("http://", "https://"))
        self.where: str | None = uri if is_server else f"mlflow ui --backend-store-uri {shlex.quote(uri)}"
        self._experiment_id = self._experiment()
        self._context = context
        self._run_id, self._last_time = None, None
        found = self._client.search_runs(
            [self._experiment_id],
            filter_string=f"tags.`{_ID_TAG}` = '{context.identity}'",
            order_by=["attributes.start_time"],
            max_results=1,
        )
        if found:
            self._go_on_with(found[0])
            self._client.set_tag(self._run_id, _ATTEMPT_TAG, str(context.attempt))
            self._client.update_run(self._run_id, status="RUNNING")

    def log_rows(self, rows: Sequence[Row], state: Snapshot) -> None:
        metrics, tags = [], {}
        for row in rows:
            self._reach(row.time)
            for name, value in row.metrics.items():
                key = _key(name)
                if isinstance(value, str):
                    tags[key] = value
                elif not self._has(key, row.step):
                    metrics.append(entities.Metric(key, float(value), _milliseconds(row.time), row.step))
        for batch in _batches(metrics, _MOST_METRICS):
            try:
                self._request("log_batch", synchronous=True, metrics=batch)
            except ConfigurationError:
                # The accepted part is not known: look up each metric before it is sent again.
                self._known |= dict.fromkeys(metric.key for metric in metrics)
                raise
        for some in _batches([entities.RunTag(key, value) for key, value in tags.items()], _MOST_PARAMS):
            self._request("log_batch", synchronous=True, tags=some)

    def log_hyperparameters(self, hyperparameters: Mapping[str, Any], state: Snapshot) -> None:
        self._reach(state.time)
        values = {_key(name): cut_at_end(str(value), _LONGEST_PARAM) for name, value in hyperparameters.items()}
        new = [entities.Param(key, value) for key, value in values.items() if key not in self._params]
        for some in _batches(new, _MOST_PARAMS):
            self._request("log_batch", synchronous=True, params=some)
        changed = {key: value for key, value in values.items() if self._params.get(key, value) != value}
        for tags in _batches([entities.RunTag(*one) for one in changed.items()], _MOST_PARAMS):
            self._request("log_batch", synchronous=True, tags=tags)
        self._params = {**values, **self._params}

    def log_images(self, entry: Images, state: Snapshot) -> None:
        self._reach(entry.time)
        folder = f"images/{_part(entry.name)}"
        for number, image in enumerate(entry.images):
            self._request("log_image", as_bytes(image), f"{folder}/{entry.step}-{number}.png")
            for name, masks in entry.masks.items():
                mask = class_numbers(masks[number])
                self._request("log_image", mask, f"{folder}/{entry.step}-{number}-{_part(name)}.png")
        if entry.mask_class_labels:
            labels = {str(number): label for number, label in entry.mask_class_labels.items()}
            self._request("log_dict", labels, f"{folder}/labels.json")

    def log_table(self, entry: Table, state: Snapshot) -> None:
        self._reach(entry.time)
        table = plain({"columns": entry.columns, "data": entry.rows})
        self._request("log_dict", table, f"tables/{_part(entry.name)}/{entry.step}.json")

    def log_text(self, entry: Text, state: Snapshot) -> None:
        self._reach(entry.time)
        self._request("log_text", entry.text, f"texts/{_part(entry.name)}/{entry.step}.txt")

    def upload_file(self, entry: Upload, state: Snapshot) -> None:
        self._reach(state.time)
        path = _path(entry.remote_file_name)
        folder, _, name = path.rpartition("/")
        if not entry.overwrite:
            there = [artifact.path for artifact in self._client.list_artifacts(self._run_id, folder or None)]
            if path in there:
                return
        # An artifact has the name of its file.
        with tempfile.TemporaryDirectory() as directory:
            link = Path(directory, name)
            link.symlink_to(entry.file_path)
            with _timeout(self.finish_seconds):
                self._request("log_artifact", str(link), folder or None)

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None and self._run_id is not None:
            end = None if self._last_time is None else _milliseconds(self._last_time)
            client.set_terminated(self._run_id, end_time=end)

    def _experiment(self) -> str:
        found = self._client.get_experiment_by_name(self._experiment_name)
        if found is None:
            try:
                return str(self._client.create_experiment(self._experiment_name, self._artifact_location))
            except exceptions.MlflowException:
                # Another consumer may have created it in between.
                found = self._client.get_experiment_by_name(self._experiment_name)
                if found is None:
                    raise
        return str(found.experiment_id)

    def _reach(self, time: float) -> None:
        self._last_time = max(time, self._last_time or time)
        if self._run_id is None:
            assert self._context is not None  # set by open()
            name, attempt = self._context.run_name, self._context.attempt
            tags = {_TAG: name, _ID_TAG: self._context.identity, _ATTEMPT_TAG: str(attempt)}
            self._go_on_with(
                self._client.create_run(self._experiment_id, _milliseconds(time), tags, self._run_name or name)
            )

    def _go_on_with(self, run: Any) -> None:
        self._run_id = run.info.run_id
        self._params = dict(run.data.params)
        self._known = dict.fromkeys(run.data.metrics)  # steps are looked up when the metric is logged first

    def _has(self, key: str, step: int) -> bool:
        if key not in self._known:
            return False
        steps = self._known[key]
        if steps is None:
            steps = {metric.step for metric in self._client.get_metric_history(self._run_id, key)}
            self._known[key] = steps
        return step in steps

    def _request(self, method: str, *arguments: Any, **named: Any) -> None:
        try:
            getattr(self._client, method)(self._run_id, *arguments, **named)
        except exceptions.MlflowException as error:
            # A deleted run is not final: opening it again finds it, or makes another.
            if error.error_code == "INVALID_PARAMETER_VALUE" and "'active' state" not in error.message:
                raise ConfigurationError(f"MLflow refuses it: {error.message.splitlines()[0]}") from None
            raise


@contextlib.contextmanager
def _timeout(seconds: float) -> Iterator[None]:
    """Raise the timeout of requests, unless the user has set it. MLflow reads only the environment, at each request."""
    if os.environ.get(_TIMEOUT) != _REQUEST_SECONDS:
        yield
        return
    os.environ[_TIMEOUT] = str(max(1, int(seconds)))
    try:
        yield
    finally:
        os.environ[_TIMEOUT] = _REQUEST_SECONDS


def _batches(items: list[Any], size: int) -> Iterator[list[Any]]:
    return (items[first : first + size] for first in range(0, len(items), size))


def _milliseconds(time: float) -> int:
    return int(time * 1000)


def _key(name: str) -> str:
    return _path(_FORBIDDEN.sub("_", str(name)))[:_LONGEST_KEY]


def _path(name: str) -> str:
    return "/".join("_" if part in _NO_NAMES else part for part in name.split("/"))


def _part(name: str) -> str:
    return re.sub(r"[^\w\-.]", "_", name)[:_LONGEST_PART]

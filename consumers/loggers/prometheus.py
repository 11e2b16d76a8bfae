"""The latest values, for Prometheus to fetch."""

import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from offloop.bus.errors import ConfigurationError
from offloop.bus.lazy import LazyModule
from offloop.bus.printing import say
from offloop.bus.protocol.snapshot import Snapshot
from offloop.consumers.api.logger import LoggerDestination, Row, RunContext

if TYPE_CHECKING:
    from wsgiref.simple_server import WSGIServer

    import prometheus_client
    from prometheus_client import core
else:
    prometheus_client, core = map(LazyModule, ("prometheus_client", "prometheus_client.core"))

_NOT_IN_A_NAME = re.compile(r"[^a-zA-Z0-9_]")
_OWN_NAMES = ("last_step", "last_step_timestamp_seconds", "run_info")
_MAX_PORT = 65535


class PrometheusLogger(LoggerDestination):
    """Serves the latest value of every metric at ``http://127.0.0.1:9464/metrics`` while the consumer runs.

    A metric is a gauge with a name that Prometheus allows, such as ``loss_train_total`` for ``loss/train/total``, and
    the labels ``run``, ``attempt`` and ``metric``, the original name. ``last_step`` and ``last_step_timestamp_seconds``
    are the highest logged step and its time; ``run_info`` has the hyperparameters as labels and the value 1. A metric
    of one of these names gets a ``_`` at its end. Texts, images, tables and files are left out.

    ``port=0`` takes a free port; standard error names it. Anyone who can reach ``address`` can read the values."""

    requires: tuple[str, str] = ("prometheus", "prometheus_client")

    def __init__(self, port: int = 9464, address: str = "127.0.0.1") -> None:
        if not 0 <= port <= _MAX_PORT:
            raise ConfigurationError(f"port is a number from 0 (a free one) to {_MAX_PORT}, not {port}")
        self._port = port
        self._address = address
        self._context: RunContext | None = None
        self._lock = threading.Lock()
        self._values: dict[str, float] = {}
        self._hyperparameters: dict[str, str] = {}
        self._step: int | None = None
        self._time = 0.0
        self._server: WSGIServer | None = None
        self._thread: threading.Thread | None = None
        self.url: str = ""

    def open(self, context: RunContext) -> None:
        self._context = context
        registry = prometheus_client.CollectorRegistry(auto_describe=False)
        registry.register(self)
        try:
            self._server, self._thread = prometheus_client.start_http_server(self._port, self._address, registry)
        except OSError as error:
            raise ConfigurationError(
                f"prometheus cannot listen on {self._address} port {self._port}: {error.strerror}; choose another with "
                "'-o prometheus.port=PORT' (0 takes a free one) or '-o prometheus.address=ADDRESS'"
            ) from None
        host = f"[{self._address}]" if ":" in self._address else self._address
        self.url = f"http://{host}:{self._server.server_port}/metrics"
        say(f"metrics for Prometheus are at {self.url}", err=True)

    def log_rows(self, rows: Sequence[Row], state: Snapshot) -> None:
        with self._lock:
            for row in rows:
                self._values |= {
                    name: float(value) for name, value in row.metrics.items() if not isinstance(value, str)
                }
                if self._step is None or row.step >= self._step:
                    self._step, self._time = row.step, row.time

    def log_hyperparameters(self, hyperparameters: Mapping[str, Any], state: Snapshot) -> None:
        with self._lock:
            self._hyperparameters |= {name: str(value) for name, value in hyperparameters.items()}

    def close(self) -> None:
        if self._server is not None and self._thread is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
        self._server = self._thread = None
        self._values, self._hyperparameters = {}, {}
        self._step, self._time = None, 0.0

    def state_dict(self) -> dict[str, Any]:
        with self._lock:
            return {
                "values": dict(self._values),
                "hyperparameters": dict(self._hyperparameters),
                "step": self._step,
                "time": self._time,
            }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._values = dict(state["values"])
        self._hyperparameters = dict(state["hyperparameters"])
        self._step, self._time = state["step"], state["time"]

    def collect(self) -> Iterator["prometheus_client.Metric"]:
        """Yield the metrics; the Prometheus client calls it for every request, in its own thread."""
        with self._lock:
            values, hyperparameters = dict(self._values), dict(self._hyperparameters)
            step, time = self._step, self._time
        assert self._context is not None  # listening begins after it is known
        labels = {"run": self._context.run_name, "attempt": str(self._context.attempt)}
        info = {_label(name): value for name, value in hyperparameters.items()} | labels
        yield core.InfoMetricFamily("run", "The run, and the hyperparameters it was given.", value=info)
        families: dict[str, core.GaugeMetricFamily] = {}

        def gauge(name: str, description: str, value: float, **further: str) -> None:
            if name not in families:
                families[name] = core.GaugeMetricFamily(name, description, labels=[*labels, *further])
            families[name].add_metric([*labels.values(), *further.values()], value)

        if step is not None:
            gauge("last_step", "The highest step that was logged.", step)
            gauge("last_step_timestamp_seconds", "When it was logged, in seconds since 1970.", time)
        for metric, value in values.items():
            gauge(_gauge_name(metric), "Logged by the run.", value, metric=metric)
        yield from families.values()


def _gauge_name(metric: str) -> str:
    name = _NOT_IN_A_NAME.sub("_", metric)
    if not name or name[0].isdigit():
        name = f"_{name}"
    return f"{name}_" if name in _OWN_NAMES else name


def _label(name: str) -> str:
    # Names of labels that begin with two underscores are reserved by Prometheus.
    label = "_" + _NOT_IN_A_NAME.sub("_", name).lstrip("_")
    return label if label[1:2].isdigit() or label == "_" else label[1:]

"""What Prometheus fetches: over HTTP, parsed by its own parsers."""

import math
import socket
import threading
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from consumers_stream import batch_end
from logged import LogsWhatItSees
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from offloop.bus.errors import ConfigurationError
from offloop.bus.protocol.snapshot import Snapshot
from offloop.consumers import Runner
from offloop.consumers.api.logger import Row, RunContext
from offloop.consumers.loggers.prometheus import PrometheusLogger

RUN = {"run": "digits", "attempt": "2"}


@pytest.fixture
def prometheus() -> Iterator[PrometheusLogger]:
    destination = PrometheusLogger(port=0)
    destination.open(RunContext("digits", 2, None))
    yield destination
    destination.close()


def fetch(url: str, accept: str = "text/plain") -> str:
    request = urllib.request.Request(url, headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return str(answer.read().decode())


def scrape(url: str) -> dict[str, Sample]:
    """Each sample by its metric as it was logged, or by its own name."""
    families = list(text_string_to_metric_families(fetch(url)))
    assert {family.type for family in families} == {"gauge"}
    return {sample.labels.get("metric", sample.name): sample for family in families for sample in family.samples}


def log(destination: PrometheusLogger, batch: int, metrics: dict[str, Any]) -> None:
    state = batch_end(batch)
    destination.log_rows([Row(batch, state.time, metrics)], state)


def test_the_latest_values_are_gauges_with_names_that_prometheus_allows(prometheus: PrometheusLogger) -> None:
    log(prometheus, 1, {"loss/train/total": 0.5, "metrics/eval/F-1 score": 0.75, "50%": 1, "done": True})
    log(prometheus, 2, {"loss/train/total": 0.25, "lr": math.nan, "clip": math.inf})
    samples = scrape(prometheus.url)
    loss = samples["loss/train/total"]
    assert (loss.name, loss.labels, loss.value) == ("loss_train_total", {**RUN, "metric": "loss/train/total"}, 0.25)
    assert samples["metrics/eval/F-1 score"].name == "metrics_eval_F_1_score"
    assert samples["metrics/eval/F-1 score"].value == 0.75
    assert (samples["50%"].name, samples["50%"].value, samples["done"].value) == ("_50_", 1, 1)
    assert math.isnan(samples["lr"].value)
    assert samples["clip"].value == math.inf
    assert (samples["last_step"].value, samples["last_step"].labels) == (2, RUN)
    assert samples["last_step_timestamp_seconds"].value == 1.7e9 + 0.5


def test_colliding_names_stay_distinct(prometheus: PrometheusLogger) -> None:
    log(prometheus, 1, {"a/b": 1, "a.b": 2, "last/step": 3, "run_info": 4})
    samples = scrape(prometheus.url)
    assert [(samples[name].name, samples[name].value) for name in ("a/b", "a.b")] == [("a_b", 1), ("a_b", 2)]
    assert [(samples[name].name, samples[name].value) for name in ("last/step", "run_info")] == [
        ("last_step_", 3),
        ("run_info_", 4),
    ]
    assert samples["last_step"].value == 1


def test_hyperparameters_are_labels_of_the_run_s_information(prometheus: PrometheusLogger) -> None:
    prometheus.log_hyperparameters({"optimizer/name": 'Adam "W"', "__lr": 0.1, "run": "other"}, batch_end(1))
    expected = {"optimizer_name": 'Adam "W"', "lr": "0.1", **RUN}
    info = scrape(prometheus.url)["run_info"]
    assert (info.labels, info.value) == (expected, 1)


def test_the_endpoint_answers_until_the_run_ends(capsys: pytest.CaptureFixture[str]) -> None:
    destination, seen = PrometheusLogger(port=0), []

    def stream() -> Iterator[Snapshot]:
        for batch in range(1, 4):
            yield batch_end(batch, rows=[[batch, {"x": batch}]])
            seen.append(scrape(destination.url)["x"].value)

    Runner(stream(), [LogsWhatItSees()], [destination]).run()
    assert seen == [1, 2, 3]
    address = capsys.readouterr().err.split()[-1]
    assert address.startswith("http://127.0.0.1:")
    with pytest.raises(OSError, match="refused"):
        fetch(address)
    assert not [thread for thread in threading.enumerate() if "serve_forever" in thread.name]


def test_a_resumed_consumer_shows_its_latest_values(prometheus: PrometheusLogger) -> None:
    log(prometheus, 4, {"x": 1})
    prometheus.log_hyperparameters({"seed": 17}, batch_end(4))
    other = PrometheusLogger(port=0)
    other.load_state_dict(prometheus.state_dict())
    other.open(RunContext("digits", 2, None))
    try:
        assert fetch(other.url) == fetch(prometheus.url)
    finally:
        other.close()


def test_a_port_in_use_is_refused_with_a_remedy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=r"prometheus\.port=PORT"):
            PrometheusLogger(port=port).open(RunContext("digits", 1, None))

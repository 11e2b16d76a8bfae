"""Trainings of four ranks on two hosts: two names (``OFFLOOP_HOST``) and folders (``OFFLOOP_RUNS_DIR``) of one machine.

Each rank writes its results to ``FOLDER/rank-N.json``.
"""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from brokers import broker_pid
from ranks_jobs import rank_loader, train
from training import Act

from offloop.bus.errors import BrokerError, OffloopError
from offloop.bus.net.nats_addresses import STREAM_VARIABLE
from offloop.bus.publisher.publisher import Publisher
from offloop.bus.runs.directory import host_name, runs_dir
from offloop.bus.types.event import Event
from offloop.trainer.distributed.ranks import Ranks, join_ranks
from offloop.trainer.stream.hosts import start_on_hosts

KILLED_AT = 3
"""The batch at which the second host's broker is killed."""


def main(folder: Path) -> None:
    """Trains with one broker for all, and with one for each host; then tries what is refused."""
    stream = os.environ.pop(STREAM_VARIABLE)
    ranks = join_ranks(on_gpu=False)
    assert ranks is not None
    known: dict[str, Any] = {"alone": _train("alone", runs_dir=folder / "alone")}
    os.environ[STREAM_VARIABLE] = stream
    known["hosts"] = _train("r", algorithms=[Act(_kill_broker, Event.BATCH_END)])
    del os.environ[STREAM_VARIABLE]
    known |= _refused(ranks, folder)
    (folder / f"rank-{ranks.rank}.json").write_text(json.dumps(known))


def _train(name: str, **settings: Any) -> Any:
    data = rank_loader(rows=32, size=8, shuffle=True)
    result = train(publish=True, run_name=name, train_dataloader=data, eval_dataloader=None, **settings)
    return [result["losses"], result["weights"]]


def _kill_broker(_event: Event, state: Any, _logger: object) -> None:
    if state.rank == 2 and state.timestamp.batch == KILLED_AT:
        os.kill(broker_pid(runs_dir() / "r"), signal.SIGKILL)


def _refused(ranks: Ranks, folder: Path) -> dict[str, Any]:
    is_first = ranks.rank in (0, 2)

    def begin(
        name: str,
        root: Path | None = None,
        is_copied: bool = True,
        start: Callable[..., Publisher] | None = None,
        resume: bool = True,
    ) -> Any:
        def publish(broker: str | None = None, stream_to: str | None = None, **agreed: Any) -> Publisher:
            return Publisher(broker=broker, rank=ranks.rank, world_size=4, **agreed)

        where = (root or runs_dir()).absolute()
        try:
            servers = "nats://nowhere" if is_copied else None
            with start_on_hosts(ranks, start or publish, where, name, servers, resume) as publisher:
                return publisher.attempt if resume else publisher.run_name
        except OffloopError as error:
            return f"{type(error).__name__}: {error}"

    def fail_on_the_second(broker: str | None = None, stream_to: str | None = None, **agreed: Any) -> Publisher:
        if ranks.rank >= 2:
            raise BrokerError("no room")
        return Publisher(broker=broker, rank=ranks.rank, world_size=4, **agreed)

    if is_first:
        Publisher("other").close()
    if ranks.rank == 0:
        for _ in range(2):
            Publisher("new", resume=True).close()
        Publisher("taken").close()
    if ranks.rank == 2:
        Publisher("taken-2").close()
    ranks.collect(b"")
    return {
        "taken": begin("taken", resume=False),
        "new": begin("new"),
        "other": begin("other"),
        "shared": begin("shared", folder / "shared"),
        "mixed": begin("mixed", is_copied=host_name() == "a"),
        "failing": begin("failing", start=fail_on_the_second),
    }

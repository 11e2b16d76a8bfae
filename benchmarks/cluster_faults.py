"""Deaths in a run that is copied into a cluster of three NATS servers and read from there.

A process publishes, and this one reads through the cluster. Meanwhile the leader, a follower, all three servers, the
bridge and the broker are killed (``kill -9``) at random moments. A figure is a silence: the seconds from a death until
a later event is read. At the end every event must have come once and in order, also to a new reader; otherwise the
program ends with an error."""

import contextlib
import math
import random
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from common import Report, argument_parser, run

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from cluster_runs import KINDS, ClusterRun
from faults import Training, resident
from helpers import wait_for
from nats_servers import NatsServer

from offloop.bus.runs.bridged import read_bridge

PATIENCE = 300.0
FLAT = 32.0  # MiB by which flat memory may grow


@dataclass(frozen=True)
class Sizes:
    kills: int  # of each kind
    rate: int  # events a second
    away: float  # seconds without a server


def deaths(report: Report, where: Path, sizes: Sizes, seed: int) -> None:
    moments = random.Random(seed)
    order = [kind for kind in KINDS for _ in range(sizes.kills)]
    moments.shuffle(order)
    silences: dict[str, list[float]] = {kind: [] for kind in KINDS}
    begin = time.monotonic()
    with ClusterRun(where, sizes.rate) as cluster:
        report.add("servers, training and bridge: until the first event", time.monotonic() - begin, "s")
        for number in report.rounds("kill -9", len(order)):
            time.sleep(moments.uniform(0, 0.5))
            silences[order[number]].append(cluster.kill(order[number], moments, PATIENCE))
        events = cluster.finish(PATIENCE)
    for kind, seconds in silences.items():
        report.add(f"{kind} killed {len(seconds)} times: silence", seconds, "s")
    report.add("events published", events, "events")
    report.add("events missing", 0, "events", 0)
    report.add("events twice or out of order", 0, "events", 0)


def away(report: Report, where: Path, sizes: Sizes, seed: int) -> None:
    del seed
    runs_dir = where / "runs"
    runs_dir.mkdir()
    (where / "nats").mkdir()
    server = NatsServer(where / "nats")
    command = [sys.executable, "-m", "offloop.bus", "server", "bridge", str(runs_dir / "r"), "--stream", server.address]
    with contextlib.ExitStack() as stack:
        stack.callback(server.kill)
        training = stack.enter_context(Training(runs_dir, rate=5000))
        bridge = stack.enter_context(subprocess.Popen(command, stderr=subprocess.DEVNULL))
        stack.callback(bridge.kill)

        def behind() -> float:
            status = read_bridge(runs_dir / "r")
            return math.inf if status is None or not status.copied else status.lag

        training.await_recorded(20_000)
        wait_for(lambda: behind() < 1_000_000, "the bridge", PATIENCE)
        pids = {"trainer": training.pid, "broker": training.broker_pid}
        before = {who: resident(pid) for who, pid in pids.items()}
        server.kill()
        first = training.published
        time.sleep(sizes.away)
        grown = {who: resident(pid) - before[who] for who, pid in pids.items()}
        server.start()
        begin = time.monotonic()
        # Written once a second, so a second of events is not a lag.
        wait_for(lambda: behind() < 1_200_000, "the bridge to catch up", PATIENCE)
        seconds = time.monotonic() - begin
        copied = training.published - first
        training.finish(PATIENCE)
        bridge.wait(PATIENCE)
    what = f"server away for {sizes.away:g} s at 5,000 events/s"
    for who, mebibytes in grown.items():
        report.add(f"{what}: growth of the {who}", mebibytes, "MiB", FLAT)
    report.add(f"{what}: until the bridge has caught up", seconds, "s")
    report.add(f"{what}: catching up", copied / seconds, "events/s", 50_000, at_least=True)


def main() -> None:
    parts: Mapping[str, Callable[..., object]] = {"deaths": deaths, "away": away}
    parser = argument_parser(__doc__, parts)
    parser.add_argument("--kills", type=int, metavar="N", help="of each kind; default: 20, with --quick 1")
    parser.add_argument("--seed", type=int, default=18, help="of the random moments; default: %(default)s")
    parser.add_argument("--away", type=float, default=60, metavar="S", help="seconds; default: %(default)g")
    options = parser.parse_args()
    kills = options.kills or (1 if options.quick else 20)
    sizes = Sizes(kills, rate=200, away=2 if options.quick else options.away)
    run("deaths in a cluster", parts, options, sizes, options.seed)


if __name__ == "__main__":
    main()

"""Windows of a training on many hosts, as its hosts would send them."""

import math
import random
from collections.abc import Collection

from offloop.bus.protocol.host_windows import (
    ARRIVAL,
    GRADIENT_NORM,
    LOSS,
    MEMORY,
    PHASE,
    STEP,
    THROUGHPUT,
    HostWindow,
    summarize,
)

BATCHES = 4
"""How many batches a window has."""
STEP_SECONDS = 0.25


def many_hosts(
    hosts: int,
    ranks_per_host: int,
    window: int = 1,
    slow: int | None = None,
    late: Collection[int] = (),
    nan: int | None = None,
    without: Collection[int] = (),
    attempt: int = 1,
) -> list[HostWindow]:
    chance = random.Random(window)
    world_size = hosts * ranks_per_host
    last = BATCHES * window
    made = []
    for host in range(hosts):
        if host in without:
            continue
        ranks = range(host * ranks_per_host, (host + 1) * ranks_per_host)
        noise = [chance.gauss(0, 0.001) for _ in ranks]
        values = {
            STEP: [STEP_SECONDS + one / 10 for one in noise],
            ARRIVAL: [-0.2 + one + (0.04 if rank == slow else 0) for rank, one in zip(ranks, noise, strict=True)],
            LOSS: [math.nan if rank == nan else 2 / window + one for rank, one in zip(ranks, noise, strict=True)],
            MEMORY: [float((60 << 30) + (rank % 8 << 28)) for rank in ranks],
            GRADIENT_NORM: [1 + 10 * one for one in noise],
            THROUGHPUT: [32 / STEP_SECONDS + one for one in noise],
            PHASE + "data": [0.01 + abs(one) for one in noise],
            PHASE + "forward": [0.04 + one for one in noise],
            PHASE + "backward": [0.18 + one for one in noise],
        }
        quantities = {
            name: summarize(name, ranks, [[one] for one in of_all], (last, nan) if math.isnan(sum(of_all)) else None)
            for name, of_all in values.items()
        }
        made.append(
            HostWindow(
                *(f"node{host:03}", attempt, tuple(ranks), world_size, last - BATCHES + 1, last),
                time_ns=(1_700_000_000 + window) * 10**9,
                seconds=BATCHES * STEP_SECONDS,
                batches=tuple(last - (rank in late) for rank in ranks),
                late=tuple(rank for rank in ranks if rank in late),
                quantities=quantities,
            )
        )
    return made

"""A training on several hosts whose run is copied into NATS: each host has a broker and a recording of its own."""

import contextlib
import json
import secrets
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

from offloop.bus import errors
from offloop.bus.errors import ConfigurationError, OffloopError, RunDirectoryError
from offloop.bus.processes import restarted_launch
from offloop.bus.runs.directory import (
    check_writable,
    host_name,
    is_name_for,
    is_own_name,
    is_taken,
    new_run_id,
    next_attempt,
    numbered_names,
)
from offloop.trainer.distributed.ranks import Ranks, rank_zero_first


class _Published(Protocol):
    address: str
    run_name: str

    def close(self, status: str, error: str | None) -> None:
        """Ends it."""


_Started = TypeVar("_Started", bound=_Published)


def start_on_hosts(
    ranks: Ranks, start: Callable[..., _Started], root: Path, run_name: str, *, is_copied: bool, resume: bool
) -> _Started:
    """Starts a publisher on every rank, with a broker on each host: in the host's own ``root``, by its first rank, and
    the other ranks of the host join it. All begin the same attempt of one run. Ranks of one host, or whose run is not
    copied anywhere, use the first rank's broker alone.

    ``start`` is called with the address of a broker or ``None``, and with what the hosts have agreed on: ``run_name``,
    ``local_world_size``, ``attempt`` and ``run_id`` of ``Publisher``. With ``resume`` the name is ``run_name``,
    otherwise the first of ``numbered_names`` that is free on all hosts. What goes wrong on the first rank of a host is
    raised on all ranks."""
    hosts = [name.decode() for name in ranks.collect((host_name() if is_copied else "").encode())]
    names = set(hosts)
    if len(names) == 1:
        return rank_zero_first(ranks, start)
    if "" in names:
        raise ConfigurationError(
            f"the run is to be copied to NATS on {', '.join(sorted(names - {''}))} alone: give all hosts the same "
            "'--stream' or OFFLOOP_STREAM"
        )
    here = hosts[ranks.rank]
    agreed: dict[str, Any] = {"local_world_size": hosts.count(here)}
    group = _Firsts(ranks, hosts)
    if not resume:
        run_name = _agree_on_name(group, root, run_name)
    agreed |= {"run_name": run_name, **_agree(group, root, run_name)}
    started: list[_Started] = []

    def begin() -> str:
        started.append(start(None, **agreed))
        return started[0].address

    try:
        address = group.each(begin)[here]
    except OffloopError as error:
        for one in started:
            one.close("failed", str(error))
        raise
    return started[0] if started else start(address, **agreed)


class _Firsts:
    """The first rank of each host, seen from any rank; ``hosts`` has each rank's."""

    def __init__(self, ranks: Ranks, hosts: list[str]) -> None:
        self._ranks = ranks
        self.numbers = {host: hosts.index(host) for host in hosts}
        """Of each host, that of rank 0 first."""
        self.here = hosts[ranks.rank]
        self.is_one = self.numbers[self.here] == ranks.rank

    def each(self, do: Callable[[], Any]) -> dict[str, Any]:
        """What came of something that the first rank of each host does, on every rank: numbers, text, lists and maps.

        Raises:
            OffloopError: what it raised on a host.
        """
        answer, failure = None, None
        if self.is_one:
            try:
                answer = do()
            except OffloopError as error:
                failure = error
        reported = [answer, failure and [type(failure).__name__, str(failure)]]
        answers = [json.loads(one) for one in self._ranks.collect(json.dumps(reported).encode())]
        if failure is not None:
            raise failure
        for host, number in self.numbers.items():
            if (other := answers[number][1]) is not None:
                raise getattr(errors, other[0], OffloopError)(f"host {host}: {other[1]}")
        return {host: answers[number][0] for host, number in self.numbers.items()}


def _agree_on_name(group: _Firsts, root: Path, run_name: str) -> str:
    launch = restarted_launch()

    def look() -> list[list[str]]:
        names = [path.name for path in root.glob("*") if is_name_for(path.name, run_name) and is_taken(path)]
        return [names, [name for name in names if is_own_name(root / name, launch)]]

    taken, own = ([name for one in group.each(look).values() for name in one[which]] for which in (0, 1))
    return own[0] if own else next(name for name in numbered_names(run_name) if name not in taken)


def _agree(group: _Firsts, root: Path, run_name: str) -> dict[str, Any]:
    """The number of the attempt that all hosts begin, and the run's identity."""
    with contextlib.ExitStack() as marked:

        def look() -> Mapping[str, Any]:
            mark = marked.enter_context(_marked(root))
            number, run_id = next_attempt(root, run_name)
            return {"mark": mark, "number": number, "id": run_id, "new": new_run_id()}

        found = group.each(look)

        def check_own() -> None:
            for host, one in found.items():
                if host != group.here and (root / one["mark"]).exists():
                    raise ConfigurationError(
                        f"hosts {group.here} and {host} have the same folder of runs, {root}: set OFFLOOP_RUNS_DIR to "
                        f"a folder of each host's own, such as {root}/$(hostname)"
                    )

        group.each(check_own)
    known = {host: one["id"] for host, one in found.items() if one["id"] is not None}
    if len(set(known.values())) > 1:
        (first, one), (second, other) = _differing(known)
        raise ConfigurationError(
            f"run {run_name!r} on host {first} (id {one}) is another one than on host {second} (id {other}): choose "
            "another run name, or remove it from the runs of one of them"
        )
    new = next(iter(found.values()))["new"]
    return {
        "attempt": max(one["number"] for one in found.values()),
        "run_id": next(iter(known.values()), new),
    }


def _differing(known: Mapping[str, str]) -> tuple[tuple[str, str], tuple[str, str]]:
    first, *others = known.items()
    return first, next(one for one in others if one[1] != first[1])


@contextlib.contextmanager
def _marked(root: Path) -> Iterator[str]:
    check_writable(root)
    mark = root / f".host-{secrets.token_hex(8)}"
    try:
        mark.touch(0o600, exist_ok=False)
    except OSError as error:
        raise RunDirectoryError(f"{mark} cannot be written: {error.strerror}", path=mark) from None
    try:
        yield mark.name
    finally:
        with contextlib.suppress(OSError):
            mark.unlink()

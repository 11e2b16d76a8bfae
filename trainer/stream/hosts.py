"""A training on several hosts, copied into NATS: each host has its own broker and recording."""

import contextlib
import secrets
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from offloop.bus.errors import ConfigurationError, OffloopError, RunDirectoryError
from offloop.bus.processes import restarted_launch
from offloop.bus.publisher.publisher import Publisher
from offloop.bus.runs.directory import host_name, is_name_for, is_own_name, is_taken, new_run_id, numbered_names
from offloop.bus.runs.writing import check_writable, next_attempt
from offloop.trainer.distributed.ranks import Ranks


def start_on_hosts(
    ranks: Ranks, make: Callable[..., Publisher], root: Path, run_name: str, servers: str | None, resume: bool
) -> Publisher:
    """Start a publisher on every rank, and a broker on each host.

    The host's first rank starts its broker in ``root``; its other ranks connect to it. All start the same attempt of
    one run. Ranks of one host, or of a run that is not copied, use the first rank's broker alone.

    ``make`` makes a ``Publisher``, with the arguments on which the hosts have agreed. With ``resume`` the name is
    ``run_name``, otherwise the first numbered name that is free on all hosts. An error on the first rank of a host is
    raised on all ranks."""
    hosts = ranks.each(lambda: "" if servers is None else host_name())
    firsts = _Firsts(ranks, hosts)
    agreed: dict[str, Any] = {"run_name": run_name, "resume": resume}
    has_several = len(firsts.numbers) > 1
    if has_several:
        if "" in hosts:
            raise ConfigurationError(
                f"only {', '.join(sorted({*hosts} - {''}))} copies the run to NATS: give all hosts the "
                "same '--stream' or OFFLOOP_STREAM"
            )
        name = run_name if resume else _agree_on_name(firsts, root, run_name)
        agreed |= {"local_world_size": hosts.count(firsts.here), "run_name": name, **_agree(firsts, root, name)}
    started: list[Publisher] = []

    def begin() -> list[str]:
        started.append(make(**agreed, stream_to=servers))
        return [started[0].address, started[0].run_name]

    try:
        address, name = firsts.each(begin)[firsts.here]
    except OffloopError as error:
        for one in started:
            one.close("failed", str(error))
        raise
    if started:
        return started[0]
    return make(broker=address, **(agreed if has_several else {"run_name": name, "resume": True}))


class _Firsts:
    """The first rank of each host, seen from any rank; ``hosts`` has each rank's host."""

    def __init__(self, ranks: Ranks, hosts: list[str]) -> None:
        self._ranks = ranks
        self.numbers = {host: hosts.index(host) for host in hosts}  # the first rank of each host, starting with rank 0
        self.here = hosts[ranks.rank]
        self._hosts = hosts

    def each(self, do: Callable[[], Any]) -> dict[str, Any]:
        """Call a function on the first rank of each host; returns the results on every rank. See :meth:`Ranks.each`."""
        several = len(self.numbers) > 1
        found = self._ranks.each(
            do, set(self.numbers.values()), lambda rank: f"host {self._hosts[rank]}: " if several else ""
        )
        return {host: found[number] for host, number in self.numbers.items()}


def _agree_on_name(firsts: _Firsts, root: Path, run_name: str) -> str:
    launch = restarted_launch()

    def look() -> list[list[str]]:
        names = [path.name for path in root.glob("*") if is_name_for(path.name, run_name) and is_taken(path)]
        return [names, [name for name in names if is_own_name(root / name, launch)]]

    found = firsts.each(look).values()
    own = [name for _, names in found for name in names]
    taken = [name for names, _ in found for name in names]
    return own[0] if own else next(name for name in numbered_names(run_name) if name not in taken)


def _agree(firsts: _Firsts, root: Path, run_name: str) -> dict[str, Any]:
    with contextlib.ExitStack() as marked:

        def look() -> Mapping[str, Any]:
            mark = marked.enter_context(_marked(root))
            number, run_id = next_attempt(root, run_name)
            return {"mark": mark, "number": number, "id": run_id, "new": new_run_id()}

        found = firsts.each(look)

        def check_own() -> None:
            for host, one in found.items():
                if host != firsts.here and (root / one["mark"]).exists():
                    raise ConfigurationError(
                        f"hosts {firsts.here} and {host} have the same folder of runs, {root}: set OFFLOOP_RUNS_DIR to "
                        f"a folder of each host's own, such as {root}/$(hostname)"
                    )

        firsts.each(check_own)
    known = {host: one["id"] for host, one in found.items() if one["id"] is not None}
    if len(set(known.values())) > 1:
        first = next(iter(known))
        other = next(host for host in known if known[host] != known[first])
        raise ConfigurationError(
            f"run {run_name!r} on host {first} (id {known[first]}) differs from the one on host {other} "
            f"(id {known[other]}): choose another run name, or remove it from the runs of one of them"
        )
    new = next(iter(found.values()))["new"]
    return {"attempt": max(one["number"] for one in found.values()), "run_id": next(iter(known.values()), new)}


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

"""Which of several ranks the others wait for."""

from collections.abc import Callable, Mapping
from statistics import fmean
from typing import NamedTuple

__all__ = ["Arrival", "Straggler", "last_to_arrive"]

_MEET_IN_FORWARD = 4


class Arrival(NamedTuple):
    """When a rank came to what the ranks of a training do together in one batch; times of its own clock, in
    nanoseconds."""

    forward: int | None
    """When its first forward pass began."""
    backward: tuple[int, ...]
    """When each of its backward passes began: one for each microbatch."""
    ended: int
    """When the batch had ended, which all ranks do together."""


class Straggler(NamedTuple):
    """The rank that came last in a batch."""

    rank: int
    waited_ns: int
    """How long the others waited for it, on average."""


def last_to_arrive(arrivals: Mapping[int, Arrival]) -> Straggler | None:
    """The rank that arrived last where the ranks meet, of those that are known; ``None`` when there is nothing to
    compare.

    Durations do not tell: whoever arrives early waits within its own backward pass, so that all take equally long. The
    ranks meet in the backward pass, where gradients are exchanged: at the first one, and, with microbatches, at the
    last one, whichever the others waited at for longer. Ranks that share the weights out meet in the forward pass
    already; they are known by starting the backward pass together although they came to the forward pass one after
    the other.

    Each time is taken relative to the end of the batch on the same rank, so the ranks' clocks need not agree.
    """
    computing = {rank: arrival for rank, arrival in arrivals.items() if arrival.backward}
    found = max(
        _last(computing, lambda arrival: arrival.backward[0]),
        _last(computing, lambda arrival: arrival.backward[-1]),
        key=lambda straggler: straggler.waited_ns,
    )
    at_forward = _last(computing, lambda arrival: arrival.forward)
    if at_forward.waited_ns > _MEET_IN_FORWARD * found.waited_ns:
        found = at_forward
    return found if found.waited_ns > 0 else None


def _last(arrivals: Mapping[int, Arrival], point: Callable[[Arrival], int | None]) -> Straggler:
    lateness = {
        rank: at - arrival.ended for rank, arrival in sorted(arrivals.items()) if (at := point(arrival)) is not None
    }
    if len(lateness) < 2:
        return Straggler(-1, 0)
    rank = max(lateness, key=lateness.__getitem__)
    latest = lateness.pop(rank)
    return Straggler(rank, round(fmean(latest - one for one in lateness.values())))

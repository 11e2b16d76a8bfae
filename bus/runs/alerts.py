"""Alerts of consumers, in a file in the run's directory."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal, TypeAlias

from offloop.bus.protocol.run_state import SecondsSince1970
from offloop.bus.run_files import JsonFile
from offloop.bus.strict_json import plain

MOST = 1000  # maximum number of alerts of a run; the newest are kept
_LONGEST = 1000

FIRING: Final = "firing"
RESOLVED: Final = "resolved"


AlertStatus: TypeAlias = Literal["firing", "resolved"]


@dataclass(frozen=True)
class RunAlert:
    """A fault, or its end."""

    id: str  # the same whenever the same events are handled
    status: AlertStatus
    about: str  # its subject, such as a rule and a metric; the same when it is resolved
    text: str
    time: SecondsSince1970
    attempt: int
    batch: int
    sent: tuple[str, ...] = ()  # channels to which it was sent, such as env:OFFLOOP_ALERT_TO


ALERTS = JsonFile("alerts.json", list[RunAlert], 16 << 20)


def note_alert(run: Path | None, alert: RunAlert) -> tuple[str, ...]:
    """Add an alert to a run with a directory, unless it is known; return where it is known to have been sent.

    An alert that is known gets the further channels in ``sent``. Failures are logged."""
    if run is None:
        return ()
    alert = replace(alert, **{name: plain(getattr(alert, name))[:_LONGEST] for name in ("id", "about", "text")})
    sent = alert.sent

    def change(known: list[RunAlert] | None) -> list[RunAlert]:
        nonlocal sent
        of_ids = {one.id: one for one in known or ()}
        before = of_ids.get(alert.id, alert)
        sent = tuple(dict.fromkeys((*before.sent, *alert.sent)))
        return _newest({**of_ids, alert.id: replace(before, sent=sent)}.values())

    ALERTS.try_update(run, change)
    return sent


def read_alerts(run: Path) -> list[RunAlert]:
    return _newest(ALERTS.find(run) or ())


def _newest(alerts: Iterable[RunAlert]) -> list[RunAlert]:
    return sorted(alerts, key=lambda one: one.time)[-MOST:]


def firing(alerts: list[RunAlert]) -> list[RunAlert]:
    open_ones: dict[tuple[int, str], RunAlert] = {}
    for alert in alerts:
        open_ones.pop((alert.attempt, alert.about), None)
        if alert.status == FIRING:
            open_ones[alert.attempt, alert.about] = alert
    return list(open_ones.values())

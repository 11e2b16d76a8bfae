"""Sends messages to people by Apprise: Slack, Discord, Telegram, ntfy, e-mail and a hundred others."""

import contextlib
import logging
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from offloop.bus.errors import ConfigurationError, require
from offloop.bus.files import read_private
from offloop.bus.printing import one_line
from offloop.bus.redaction import redact

_PAUSES = (0.0, 2.0, 8.0)  # before each try, in seconds
_SECONDS = 60.0  # limit of all tries together
_LISTED = "https://appriseit.com/services/ lists them"


@dataclass(frozen=True)
class Channel:
    """An address of Apprise, which may have secrets."""

    name: str  # without secrets
    client: Any
    secrets: Sequence[str]

    def send(self, message: Mapping[str, str], picture: bytes | None) -> str | None:
        """Send once; return why it failed, without secrets."""
        with contextlib.ExitStack() as opened:
            attach = None
            # Without room on the disk, the text alone is sent.
            with contextlib.suppress(OSError):
                if picture and self.client[0].attachment_support:
                    path = Path(opened.enter_context(tempfile.TemporaryDirectory()), "loss.png")
                    path.write_bytes(picture)
                    attach = str(path)
            try:
                result = self.client.notify(**message, body_format="text", attach=attach)
                reasons = [entry.message for service in result for entry in service.logs()]
            except Exception as error:  # noqa: BLE001  services are plug-ins, which may raise anything
                result, reasons = False, [type(error).__name__]
        reason = one_line(reasons[-1]) if reasons else "the service refused it"
        for secret in self.secrets:
            reason = reason.replace(secret, "***")
        return None if result else reason


def open_channels(given: Sequence[str]) -> list[Channel]:
    """Return the channels of addresses, ``env:NAME`` and ``file:PATH``. Raises ConfigurationError, without secrets."""
    if not given:
        return []
    require("sending alerts", "alerts", "apprise", "PIL")
    # What Apprise logs may have secrets.
    logging.getLogger("apprise").propagate = False
    return [_channel(source, *one) for source in given for one in enumerate(_addresses(source), 1)]


def _addresses(source: str) -> Iterator[str]:
    kind, _, name = source.partition(":")
    if kind not in ("env", "file"):
        yield source
        return
    text = os.environ.get(name, "") if kind == "env" else read_private(Path(name), "the file of addresses")
    found = [line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("#")]
    if not found:
        what = f"${name}" if kind == "env" else name
        raise ConfigurationError(f"{what} has no address: put one into it, such as ntfys://ntfy.sh/TOPIC; {_LISTED}")
    yield from found


def _channel(source: str, number: int, url: str) -> Channel:
    import apprise

    client: Any = apprise.Apprise(asset=apprise.AppriseAsset(app_id="offloop", async_mode=False))
    is_plain = source == url
    where = f"the address {url.partition('://')[0]}://..." if is_plain else f"address {number} of {source}"
    if not client.add(url):
        raise ConfigurationError(f"{where} is not one of a service that Apprise knows: {_LISTED}")
    whole, masked = client[0].url(), client[0].url(privacy=True)
    if is_plain and (masked != whole or redact(url) != url):
        raise ConfigurationError(
            f"{where} has a secret, which every user sees in the list of processes: put it into $OFFLOOP_ALERT_TO or a "
            "file of yours, and give 'env:OFFLOOP_ALERT_TO' or 'file:PATH'"
        )
    parts = re.split(r"[/?&=@:]+", f"{url}/{unquote(url)}/{unquote(whole)}")
    secrets = sorted({part for part in parts if len(part) > 3 and part not in masked}, key=len, reverse=True)
    return Channel(url if is_plain else f"{source}#{number}", client, (url, *secrets))


def deliver(
    channels: Sequence[Channel], message: Mapping[str, str], picture: bytes | None, on_sent: Callable[[str], object]
) -> Mapping[str, str]:
    """Send to all channels, a failed one again after a pause, for at most a minute.

    ``on_sent`` gets the name of each channel at once. Return why each of the others failed."""
    problems = {channel.name: f"no answer within {_SECONDS:g} s" for channel in channels}

    def work() -> None:
        for pause in _PAUSES:
            time.sleep(pause if problems else 0.0)
            for channel in [one for one in channels if one.name in problems]:
                if problem := channel.send(message, picture):
                    problems[channel.name] = problem
                else:
                    on_sent(channel.name)
                    del problems[channel.name]

    # A service that never ends its answer must not hold the consumer.
    thread = threading.Thread(target=work, name="offloop-alert", daemon=True)
    thread.start()
    thread.join(_SECONDS)
    return dict(problems)

"""Keeps passwords and tokens out of what is written down about a run: its command line and what describes it."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

REDACTED = "***"
"""What stands in the place of a secret."""

_ANYWHERE = frozenset(
    ("password", "passwd", "passphrase", "secret", "secrets", "credential", "credentials", "apikey", "authorization")
)
_AT_THE_END = frozenset(("token", "key", "auth", "pwd", "bearer"))
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_ASSIGNMENT = re.compile(r"""^(-{0,2}[\w.\-/]+)(\s*[=:]\s*)(?!//)(.*)$""", re.DOTALL)
_NAME = re.compile(r"""(?<![\w.\-])[\w.\-]{1,100}+["']?\s{0,2}[=:]\s{0,2}""")
_VALUE = re.compile(r""""[^"]*"|'[^']*'|[^\s,;&"'}\]]+""")
_IN_ADDRESS = re.compile(r"(://[^/\s:@]*):[^/\s@]+@")


def redact(value: Any) -> Any:
    """A value without its secrets: in maps, texts under names such as ``api_key`` or ``password`` become ``***``; in
    every other text :func:`redact_text` replaces them."""
    if isinstance(value, Mapping):
        return {
            name: REDACTED if isinstance(part, str) and part and _is_secret(str(name)) else redact(part)
            for name, part in value.items()
        }
    if isinstance(value, list | tuple):
        return [redact(part) for part in value]
    return redact_text(value) if isinstance(value, str) else value


def redact_command(words: Sequence[str]) -> list[str]:
    """The words of a command line, each as :func:`redact_text` gives it, and ``***`` for one that follows an option
    such as ``--password``. A secret that has no such name before it is not recognised."""
    redacted: list[str] = []
    follows = False
    for word in words:
        is_option = word.startswith("--")
        redacted.append(REDACTED if follows and not is_option else redact_text(word))
        follows = word.startswith("-") and "=" not in word and _is_secret(word)
    return redacted


def redact_text(text: str) -> str:
    """The text with ``***`` for what follows names such as ``api_key=`` or ``"token":``, and for passwords in addresses
    (``https://user:***@host``)."""
    whole = _ASSIGNMENT.match(text)
    if whole and _is_secret(whole[1]):
        return f"{whole[1]}{whole[2]}{REDACTED}"

    text = _IN_ADDRESS.sub(rf"\1:{REDACTED}@", text)
    parts, kept_to, at = [], 0, 0
    while name := _NAME.search(text, at):
        at = name.end()
        if _is_secret(name[0]) and (value := _VALUE.match(text, at)):
            parts += [text[kept_to:at], REDACTED]
            kept_to = at = value.end()
    return "".join(parts) + text[kept_to:]


def _is_secret(name: str) -> bool:
    """Whether what has this name is likely to be a secret: ``max_tokens`` and ``key_size`` are not."""
    words = [word.lower() for word in _WORD.findall(name)]
    return bool(words) and (words[-1] in _AT_THE_END or not _ANYWHERE.isdisjoint(words))

"""Keeps passwords, keys and tokens out of recorded command lines, configurations, descriptions and errors."""

import json
import os
import re
from collections.abc import Iterator, Mapping, Set
from numbers import Number
from typing import Any, Literal, TypeAlias
from urllib.parse import quote

REDACTED = "***"  # replaces a secret


def redact(value: Any) -> Any:
    """Return a value with ``***`` in place of its secrets.

    They are recognised

    - by name: values of maps under names such as ``api_key``, ``HF_TOKEN`` or ``password``, with all that is below; in
      texts and lists of words, such as a command line, the words after such a name;
    - by shape: keys and tokens of widespread services, JSON web tokens, PEM blocks, user information and signatures in
      addresses, ``Bearer`` credentials;
    - by environment: values of environment variables with such names, in any place, unless they name a file. Short
      values count only as whole words.

    Values of ``max_tokens``, ``sort_key`` or ``pad_token`` are shown, and so are ``None``, booleans and numbers, except
    numbers under ``password``, ``secret`` and the like. Maps and named tuples become dicts, tuples lists; other objects
    are returned unchanged."""
    return _Redaction().redact(value)


_Kind: TypeAlias = Literal["everything", "text"]  # secret values under a name: text excludes numbers, also within texts


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")

_WITHIN_A_WORD = ("password", "passwd", "passphrase", "passcode", "credential", "apikey")
_ANYWHERE = _words("secret secrets creds authorization bearer cookie cookies jwt pwd")
_TEXT = _words("auth oauth pw sig signature hmac")
_HEADERS = _words("authorization cookie")  # their values are of several words
_PASSES = _words("db user login admin root sudo smtp imap ftp ssh mail http proxy my sql pg redis mongo")
_OF_KEYS = _words(
    "api access account app auth aws azure client deploy encryption gcp hf license master openai pass priv private "
    "secret service shared signing ssh storage wandb"
)  # words that are secret before key in one word
_PATS = _words("gh github gitlab git azure devops databricks")  # services with personal access tokens
_AFTER = _words("value string str v old prod production staging dev live raw plain header")
"""Words at the end of a name that change nothing."""
_COUNTED = _words(
    "pad padding eos bos unk unknown mask sep cls special image audio video speech stop start end begin boi eoi "
    "fim sub pre de re un num n max min total seen new input output prompt completion generated train eval test batch "
    "context per prediction decoder encoder response reasoning thinking budget count target label drop dropped extra "
    "added suppress"
)  # words before token that mean a token of a model's text
_DATA_KEYS = _words(
    "sort primary foreign public label image input output text target metric group join cache partition column "
    "dict state feature index data batch sample field row loss audio video prompt completion message messages "
    "content question answer query value attribute config lookup dispatch registry module param parameter layer "
    "monitor best tag map rng prng random"
)  # words before key that mean a key of data


def _kind(name: str) -> _Kind | None:
    """Secret values under a name; ``None`` for a name that does not sound secret."""
    words = [word.lower() for word in _WORD.findall(name)]
    if any(word in _ANYWHERE or word.endswith(("secret", "secrets")) for word in words):
        return "everything"
    if any(part in word for word in words for part in _WITHIN_A_WORD):
        return "everything"
    while len(words) > 1 and words[-1] in _AFTER:
        del words[-1]
    if not words:
        return None
    last, before = words[-1], words[-2] if len(words) > 1 else ""
    if last in _TEXT or (last == "pat" and before in _PATS):
        return "text"
    if found := re.fullmatch(r"(.*)(token|key)s?", last):
        joined, what = found.groups()
        is_name = not joined or what == "token" or joined in _OF_KEYS
        is_secret = is_name and (joined or before) not in (_COUNTED if what == "token" else _DATA_KEYS)
        return "text" if is_secret else None
    if found := re.fullmatch(r"(.*)(pass|pwd)", last):
        return "everything" if (found[1] or before or "db") in _PASSES else None
    return None


_SHOWN = re.compile(r"(?:none|null|true|false|\*+)?", re.IGNORECASE)
_NUMBER = re.compile(r"[-+]?\d[\d_.,]*+(?:[eE][-+]?\d+)?[KMBTkmbt]?(?:tok)?")
_DEEPEST = 64
_CONTAINERS = (list, tuple, Set, Mapping)


def _is_secret(kind: _Kind, value: Any) -> bool:
    if value is None or isinstance(value, bool):
        return False
    if isinstance(value, str):
        return not _SHOWN.fullmatch(value) and (kind == "everything" or not _NUMBER.fullmatch(value))
    if isinstance(value, Number):
        return kind == "everything"
    if isinstance(value, list | tuple | Set):
        return any(_is_secret(kind, part) if not isinstance(part, _CONTAINERS) else bool(part) for part in value)
    if isinstance(value, bytes | bytearray | Mapping):
        return bool(value)
    return kind == "everything" or isinstance(value, os.PathLike)


def _is_secret_pair(name: Any, value: Any) -> bool:
    kind = _kind(name) if isinstance(name, str) else None
    return kind is not None and _is_secret(kind, value)


def is_named_tuple(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_asdict")


class _Redaction:
    """The secrets of the environment, and the containers on the way to the current value."""

    def __init__(self) -> None:
        self._known, self._words = _environment_secrets()
        self._within: set[int] = set()

    def redact(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, bytes | bytearray):
            text = bytes(value).decode("utf-8", "surrogateescape")
            redacted = self._text(text)
            return value if redacted == text else redacted.encode("utf-8", "surrogateescape")
        if isinstance(value, os.PathLike):
            path = os.fsdecode(value)
            redacted = self._text(path)
            return value if redacted == path else redacted
        if is_named_tuple(value):
            return self.redact(value._asdict())
        if not isinstance(value, _CONTAINERS):
            return value
        if id(value) in self._within or len(self._within) >= _DEEPEST:
            return REDACTED
        self._within.add(id(value))
        try:
            if isinstance(value, Mapping):
                named = value.get("name", value.get("key"))
                return {
                    self.redact(name): REDACTED
                    if _is_secret_pair(named if name == "value" else name, part)
                    else self.redact(part)
                    for name, part in value.items()
                }
            if isinstance(value, Set):
                return {self.redact(part) for part in value}
            return list(self._words_of(value))
        finally:
            self._within.discard(id(value))

    def _words_of(self, values: list[Any] | tuple[Any, ...]) -> Iterator[Any]:
        """Redact a list as words of a command line, where values follow an option, or as pairs of name and value."""
        kind: _Kind | None = None
        for value in values:
            is_option = isinstance(value, str) and value.startswith("-")
            if is_option or (isinstance(value, str) and value.endswith((":", "="))):
                kind = None if "=" in value[:-1] else _kind(value)
                yield self.redact(value)
            elif kind is not None and _is_secret(kind, value):
                yield REDACTED
            elif isinstance(value, list | tuple) and len(value) == 2 and _is_secret_pair(*value):
                yield [self.redact(value[0]), REDACTED]
            else:
                yield self.redact(value)

    def _text(self, text: str) -> str:
        for secret in self._known:
            # Far faster than one search for any of them, as there are few.
            text = text.replace(secret, REDACTED)
        if self._words is not None:
            text = self._words.sub(REDACTED, text)
        text = _SHAPES.sub(REDACTED, text)
        text = _USER_INFORMATION.sub(_without_user, text)
        return _without_named(text)


_LONG = 8
_SHORT = 4


def _environment_secrets() -> tuple[list[str], re.Pattern[str] | None]:
    """Values of variables with secret names, as written in texts, the longest first; and a pattern for short ones."""
    known: set[str] = set()
    short: set[str] = set()
    for name, value in os.environ.items():
        secret = value.strip()
        kind = _kind(name)
        if kind is None or not _is_secret(kind, secret) or name in ("PWD", "OLDPWD"):
            continue
        if os.path.isabs(secret) and os.path.exists(secret):
            continue
        if len(secret) >= _LONG:
            encoded = os.fsencode(secret)
            known |= {secret, repr(secret)[1:-1], json.dumps(secret)[1:-1], quote(encoded), quote(encoded, safe="")}
        elif len(secret) >= _SHORT and not secret.isalpha() and not secret.isdecimal():
            short.add(re.escape(secret))
    words = re.compile(rf"(?<!\w)(?:{'|'.join(sorted(short, key=len, reverse=True))})(?!\w)") if short else None
    return sorted(known, key=len, reverse=True), words


# Each begins at a word and repeats nothing that can be divided in two ways, so that a search takes linear time.
_SHAPES = re.compile(
    r"""
    -----BEGIN\ [A-Z0-9\ ]{1,60}-----.*?(?:-----END\ [A-Z0-9\ ]{1,60}-----|\Z)
    | (?<![\w-])eyJ[\w-]{5,}+\.[\w-]{5,}+(?:\.[\w-]*+){0,3}                          # JSON web tokens
    | (?<![A-Za-z0-9])
      (?:
        (?:hf|gh[opusr]|npm|gsk|r8|dop_v1|dckr_pat|api_org|whsec)_
        (?:[A-Za-z0-9]{16,}+|(?=[A-Za-z]*+\d)[A-Za-z0-9]{8,}+)
        | github_pat_\w{10,}+
        | wandb_v\d_\w{16,}+
        | [rsp]k_(?:live|test)_[A-Za-z0-9]{8,}+
        | (?:sk|glpat|nvapi|pypi)-(?:[\w-]{20,}+|(?=[A-Za-z_-]{0,20}+\d)[\w-]{8,}+)
        | (?:xox[a-z]|xapp)-[\w-]{8,}+
        | (?:AKIA|ASIA|ABIA|ACCA|AGPA|AIDA|AROA|AIPA|ANPA|ANVA)[A-Z0-9]{16}(?![A-Za-z0-9])
        | AIza[\w-]{30,}+
        | ya29\.[\w.-]{8,}+
        | SG\.[\w-]{8,}+\.[\w-]{8,}+
        | (?:hooks\.slack\.com/(?:services|workflows|triggers)|discord(?:app)?\.com/api/webhooks)/[\w/-]{8,}+
      )
    | (?<=\bBearer\s)[\w.~+/=-]{8,}+
    | (?<=\bbearer\s)(?=[A-Za-z.~+/=_-]{0,40}+\d)[\w.~+/=-]{8,}+
    """,
    re.VERBOSE | re.DOTALL,
)
# Also with an unquoted "/", "?" or "#" in the password; otherwise a port follows the host's colon.
_USER_INFORMATION = re.compile(
    r"""(?<=://)(?:[^\s/?#"<>]*@|[^\s/?#"<>:@\[]{0,200}+:(?!\d{0,5}(?:[/?#]|\Z))[^\s"<>]{0,200}@)"""
)
_NAME = re.compile(r"(?<![\w.-])[\w.-]++")
_WHOLE = re.compile(r"[\w.\-/]++\s{0,8}[=:]\s{0,8}(?!//)")
_SEPARATOR = re.compile(r"""[\\"'`\])]{0,4}\s{0,8}(?:=>|:=|==|[=:](?!//))\s{0,8}""")
_AFTER_OPTION = re.compile(r"""["']?,?\s{1,8}""")
_QUOTED = re.compile(r"""[bBrRuUfF]{0,2}+(\\*+(?:\"{3}|'{3}|["'`]))(?:(?!\1)(?:\\.|[^\\]))*+(?:\1|\Z)""", re.DOTALL)
_QUOTES = "\"'`"
_BEFORE_QUOTED = f"\\{_QUOTES}bBrRuUfF"
_STOPS = ",;&)]}"  # ends of an unquoted value among quoted ones
_IN_QUERY = re.compile(r"""[^\s&;#"'<>]*+""")


def _without_user(found: re.Match[str]) -> str:
    """Redact user and password, as either may be a token. The user of ``ssh://git@host`` is not secret."""
    user, before = found[0][:-1], found.string[max(0, found.start() - 6) : found.start()]
    return found[0] if not user or (before == "ssh://" and ":" not in user) else f"{REDACTED}@"


def _without_named(text: str) -> str:
    whole = _WHOLE.match(text)
    if whole and (kind := _kind(whole[0])) and _is_secret(kind, text[whole.end() :].strip()):
        return f"{whole[0]}{REDACTED}"

    parts, kept_to, at = [], 0, 0
    while name := _NAME.search(text, at):
        at = name.end()
        found = _SEPARATOR.match(text, at) or (name[0].startswith("-") and _AFTER_OPTION.match(text, at))
        if not found or not (kind := _kind(name[0])):
            continue
        begin = found.end()
        if found.re is _AFTER_OPTION and text.startswith("-", begin):
            continue
        end = _end_of_value(name, found, begin)
        if _is_secret(kind, text[begin:end].strip(f"{_QUOTES},")):
            parts += [text[kept_to:begin], REDACTED]
            kept_to = at = end
    return "".join(parts) + text[kept_to:]


def _end_of_value(name: re.Match[str], separator: re.Match[str], begin: int) -> int:
    text, before = name.string, name.string[max(0, name.start() - 1) : name.start()]
    if before in ("?", "&", ";") and (found := _IN_QUERY.match(text, begin)):
        return found.end()
    is_header = not _HEADERS.isdisjoint(word.lower() for word in _WORD.findall(name[0]))
    is_quoted = separator[0][:1] in ("\\", *_QUOTES)
    if is_header and not is_quoted and text[begin : begin + 1] not in _QUOTES:
        end = text.find(before if before and before in _QUOTES else "\n", begin)
        return len(text) if end < 0 else end
    return _end_of_word(text, begin, stops=_STOPS if is_quoted else "")


def _end_of_word(text: str, begin: int, stops: str) -> int:
    """Return the end of a word: a blank, one of ``stops``, or an unmatched bracket, outside of quotes and brackets."""
    at, depth = begin, 0
    while at < len(text):
        letter = text[at]
        if letter in _BEFORE_QUOTED and not text[at - 1 : at].isalnum() and (quoted := _QUOTED.match(text, at)):
            at = quoted.end()
            stops = stops if depth else _STOPS
            continue
        if letter in "([{":
            depth += 1
        elif letter in ")]}" and depth:
            depth -= 1
        elif not depth and (letter.isspace() or letter in stops):
            break
        at += 1
    return at

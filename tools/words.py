"""Fails on words of our own dialect where the field has a standard term: ``python tools/words.py``.

Reads the documentation, and the docstrings, comments and messages of the packages. Add a word when its last use is
gone; ``docs/glossary.md`` says what the standard terms mean."""

import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

_GO_ON = "resume, continue"
_SOMEBODY = "name the process, the person or the caller, or use the passive"

WORDS = {
    r"told|tells": "report, show, list, answer",
    r"go(es|ing)? on|gone on": _GO_ON,
    r"nobody|somebody|whoever|anybody|everybody": _SOMEBODY,
    r"mend(s|ed|ing)?": "repair, recover",
    r"door": "control endpoint",
    r"bury|buries|burial": "reap",
    r"strangers?": "unauthenticated peer",
    r"lent": "borrowed",
    r"lanes?": "worker, thread",
    r"desk": "server",
    r"heeds?": "apply, follow",
    r"makes? no sense": "is malformed, is invalid",
    r"journal(ed|s)?": "recording, record",
    r"what there is": "name it: the available fields, the known runs",
    r"for the sake of": "for",
    r"parcels?|bundles?": "batch",
    r"(?<!there )(is|are|was|were) no (?!longer\b|more\b)\w+": "is not a, is malformed, invalid",
    r"stands? still|stood still": "is paused",
    r"(is|are|was|were) over(?=[.,;:)])": "has finished, has ended",
}
"""Pattern to replacement, in documents and in the packages."""

_ROOT = Path(__file__).resolve().parents[1]
_FENCE = re.compile(r"^```.*?^```|`[^`\n]*`|\]\([^)]*\)", re.MULTILINE | re.DOTALL)


def violations(root: Path = _ROOT) -> Iterator[str]:
    """Yield a line for each use: its place, the word, and the replacement."""
    pages = [
        root / "README.md",
        root / "CONTRIBUTING.md",
        root / "CHANGELOG.md",
        *sorted((root / "docs").rglob("*.md")),
    ]
    for page in pages:
        if page.is_file():
            # Names in code and addresses stay.
            text = _FENCE.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), page.read_text("utf-8"))
            yield from _found(page.relative_to(root), enumerate(text.splitlines(), 1))
    for package in ("bus", "trainer", "consumers", "offloop"):
        for module in sorted((root / package).rglob("*.py")):
            yield from _found(module.relative_to(root), _prose(module))


def _found(path: Path, lines: Iterator[tuple[int, str]] | enumerate[str]) -> Iterator[str]:
    for number, line in lines:
        for pattern, instead in WORDS.items():
            for match in re.finditer(rf"(?<![\w/.-])(?:{pattern})(?![\w/-])", line, re.IGNORECASE):
                yield f"{path}:{number}: {match[0]!r}: write {instead}"


def _prose(module: Path) -> Iterator[tuple[int, str]]:
    with module.open("rb") as file:
        source = io.BytesIO(file.read())
    kinds = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", None)}
    for token in tokenize.tokenize(source.readline):
        # A single word in quotes is a name.
        if token.type in kinds and not token.string.strip("\"'").isidentifier():
            for offset, line in enumerate(token.string.splitlines()):
                yield token.start[0] + offset, line


if __name__ == "__main__":
    found = list(violations())
    print("\n".join(found) or "no words to replace")
    sys.exit(bool(found))

"""The pages of the documentation as tests look at them: blocks of code, and command lines."""

import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token
from paths import ROOT

_AT_THE_ROOT = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
PAGES = sorted(str(path.relative_to(ROOT)) for path in [*_AT_THE_ROOT, *(ROOT / "docs").rglob("*.md")])
"""Every page, from the root of the repository."""

NOT_RUN = "not run in the tests: "
"""How the title of a block begins that cannot run here; the reason follows. Readers see it above the block."""

TYPED_PAGES = (
    *("README.md", "docs/index.md", "docs/write_callback.md", "docs/write_logger.md"),
    *("docs/checkpoints.md", "docs/post_training.md", "docs/recordings.md"),
)
"""Pages whose blocks of Python pass strict type checkers."""

_SHELL = {"", "sh", "bash", "console", "shell"}
_TITLE = re.compile(r'title="([^"]*)"')
_DRAWING = re.compile(r"[─│┌└▶◀]|-->|<--|\s->\s|\|--")
_INLINE = re.compile(r"(?:bus|trainer|consumer|offloop|pip install|make) \S")


@dataclass(frozen=True)
class Block:
    """A block of code."""

    page: str
    line: int
    """Where it begins on its page, from 1."""
    language: str
    title: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def is_run(self) -> bool:
        """Whether it does not say that it cannot run in the tests."""
        return not self.title.startswith(NOT_RUN)

    @property
    def file_name(self) -> str:
        """What the file is called that it stands for."""
        return self.title if self.title.endswith(".py") else "example.py"


@dataclass(frozen=True)
class CommandLine:
    """A command as a reader would type it."""

    page: str
    line: int
    words: tuple[str, ...]
    is_whole: bool
    """Whether it can be typed as it stands; one within a sentence may leave out what goes without saying."""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {' '.join(self.words)}"


def blocks(page: str, language: str) -> list[Block]:
    """Return the blocks of a page in that language."""
    found = []
    for token in _tokens(page):
        name, _, rest = token.info.strip().partition(" ")
        if token.type == "fence" and name == language:
            title = _TITLE.search(rest)
            found.append(Block(page, _line(token), language, title[1] if title else "", token.content))
    return found


def write_typed_blocks(folder: Path) -> list[Path]:
    """Write the blocks of Python of :data:`TYPED_PAGES` as files; return them."""
    folder.mkdir(exist_ok=True)
    files = []
    for number, block in enumerate(block for page in TYPED_PAGES for block in blocks(page, "python")):
        files.append(folder / (block.title if block.title.endswith(".py") else f"example{number}.py"))
        files[-1].write_text(block.text)
    return files


def command_lines(page: str) -> Iterator[CommandLine]:
    """Every command line on a page: in blocks for the shell, and within sentences."""
    for token in _tokens(page):
        is_shell = token.type == "code_block" or (
            token.type == "fence" and token.info.strip().partition(" ")[0] in _SHELL
        )
        if is_shell and not _DRAWING.search(token.content):
            for offset, text in _logical_lines(token.content):
                if words := _words(text):
                    yield CommandLine(page, _line(token) + offset, words, True)
        for child in token.children or ():
            if child.type == "code_inline" and _INLINE.match(child.content) and (words := _words(child.content)):
                yield CommandLine(page, _line(token), words, False)


def _tokens(page: str) -> list[Token]:
    return MarkdownIt("commonmark").enable("table").parse((ROOT / page).read_text())


def _line(token: Token) -> int:
    assert token.map is not None
    return token.map[0] + 1


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    joined, began = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        began = began if joined else number
        joined += line.removesuffix("\\")
        if not line.endswith("\\"):
            yield began, joined
            joined = ""


def _words(text: str) -> tuple[str, ...]:
    """Return the words of the first command in a line, without prompt and comment; none for what is no command line."""
    try:
        lexer = shlex.shlex(text.strip().removeprefix("$ "), posix=True, punctuation_chars="|&;<>")
        lexer.whitespace_split = True
        words = list(lexer)
    except ValueError:
        return ()
    end = next((number for number, word in enumerate(words) if set(word) <= set("|&;<>")), len(words))
    return tuple(words[:end])


if __name__ == "__main__":
    # For the type check of ``make check``, without what was on the pages before.
    pages = Path(sys.argv[1])
    shutil.rmtree(pages, ignore_errors=True)
    write_typed_blocks(pages)

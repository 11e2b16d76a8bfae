"""The word list of ``make check``."""

import subprocess
import sys
from pathlib import Path

from paths import ROOT

WORDS = ROOT / "tools" / "words.py"


def test_the_words_are_gone() -> None:
    done = subprocess.run([sys.executable, WORDS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_a_word_is_found_with_its_line_and_what_to_write_instead(tmp_path: Path) -> None:
    for folder in ("tools", "docs", "bus/types"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "tools" / "words.py").write_text(WORDS.read_text())
    (tmp_path / "docs" / "page.md").write_text("`nobody` is code.\n\nNobody is not.\n\n```\nnobody\n```\n")
    (tmp_path / "bus" / "module.py").write_text('heed = 1\n\n\ndef reap():\n    """Reaps.\n\n    Does not bury."""\n')
    (tmp_path / "bus" / "types" / "module.py").write_text('DOOR = "door"  # There is no door; it is no gate.\n')
    done = subprocess.run(
        [sys.executable, tmp_path / "tools" / "words.py"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    page, module, *plain = done.stdout.splitlines()
    assert page.startswith("docs/page.md:3: 'Nobody': write ")
    assert module == "bus/module.py:7: 'bury': write reap"
    # In a room that is free of all words; a name in quotes is left alone.
    assert plain == [
        "bus/types/module.py:1: 'door': write control endpoint",
        "bus/types/module.py:1: 'is no gate': write is not a, is malformed, invalid",
    ]

"""One name, one thing: a class's name says which class is meant, in every package, page and traceback."""

import ast
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PACKAGES = ("bus", "trainer", "consumers", "offloop")
# One for each framework, imported from the framework's module: offloop.lightning, offloop.keras, ...
ADAPTERS = {"OffloopCallback"}


def _modules(root: Path) -> Iterator[Path]:
    # os.walk follows no links: in offloop/ the other packages are links, so each file is read once.
    for package in PACKAGES:
        for folder, _, files in os.walk(root / package):
            yield from (Path(folder, name) for name in files if name.endswith(".py"))


def duplicate_classes(root: Path) -> list[str]:
    """The names of more than one class, with the places. A private class belongs to its module."""
    places: dict[str, list[str]] = defaultdict(list)
    for path in sorted(_modules(root)):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and node.name not in ADAPTERS:
                places[node.name].append(f"{path.relative_to(root)}:{node.lineno}")
    return [f"{name}: {', '.join(found)}" for name, found in sorted(places.items()) if len(found) > 1]


def test_no_two_classes_have_the_same_name() -> None:
    duplicates = duplicate_classes(REPOSITORY)
    assert not duplicates, "defined more than once, rename all but one:\n" + "\n".join(duplicates)


def test_a_duplicate_is_reported_with_its_places(tmp_path: Path) -> None:
    for name, text in {
        "bus/one.py": "class Window: ...\nclass _Row: ...\n",
        "trainer/two.py": "class _Row: ...\n\ndef f():\n    class Window: ...\n",
        "offloop/three.py": "class Other: ...\n",
    }.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    (tmp_path / "offloop" / "bus").symlink_to("../bus")
    assert duplicate_classes(tmp_path) == ["Window: bus/one.py:1, trainer/two.py:4"]

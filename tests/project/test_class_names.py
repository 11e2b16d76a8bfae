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


def _modules() -> Iterator[Path]:
    # os.walk follows no links: in offloop/ the other packages are links, so each file is read once.
    for package in PACKAGES:
        for folder, _, files in os.walk(REPOSITORY / package):
            yield from (Path(folder, name) for name in files if name.endswith(".py"))


def duplicate_classes() -> list[str]:
    """The names of more than one class, with the places. A private class belongs to its module."""
    places: dict[str, list[str]] = defaultdict(list)
    for path in sorted(_modules()):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and node.name not in ADAPTERS:
                places[node.name].append(f"{path.relative_to(REPOSITORY)}:{node.lineno}")
    return [f"{name}: {', '.join(found)}" for name, found in sorted(places.items()) if len(found) > 1]


def test_no_two_classes_have_the_same_name() -> None:
    duplicates = duplicate_classes()
    assert not duplicates, "defined more than once, rename all but one:\n" + "\n".join(duplicates)

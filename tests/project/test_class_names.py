"""One name, one thing: a class's name says which class is meant, in every package, page and traceback."""

import ast
from collections import defaultdict

from paths import ROOT

ADAPTERS = {"OffloopCallback"}
"""One for each framework, imported from the framework's module: offloop.lightning, offloop.keras, ..."""


def test_no_two_classes_have_the_same_name() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    # The other packages are links in offloop/, which are not followed. A private class belongs to its module.
    for path in (path for name in ("bus", "trainer", "consumers", "offloop") for path in (ROOT / name).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and node.name not in ADAPTERS:
                places[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not {name: found for name, found in places.items() if len(found) > 1}

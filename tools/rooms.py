"""An import-linter contract: rooms (packages and modules) import only the rooms that are listed for them.

A line of ``rooms`` is ``bus.net -> bus.errors bus.protocol``, names within ``offloop``. A module belongs to the longest
listed name that is a prefix of its own. A module without one, such as ``bus/__init__.py``, may import everything, and
no room may import it."""

from collections import defaultdict
from graphlib import CycleError, TopologicalSorter

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output


class RoomsContract(Contract):  # type: ignore[misc]
    """Broken by an unlisted import between rooms, by an unused one in the list, and by a circle."""

    rooms = fields.ListField(subfield=fields.StringField())

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        lines = (line.split("->") for line in self.rooms)
        allowed = {room.strip(): set(below.split()) for room, below in lines}
        found: dict[str, dict[str, str]] = defaultdict(dict)
        for module in graph.modules:
            room = _room_of(module, allowed)
            for imported in graph.find_modules_directly_imported_by(module) if room else ():
                other = _room_of(imported, allowed) or imported.removeprefix("offloop.")
                if other != room and not graph.is_module_squashed(imported):
                    found[room][other] = f"{module} imports {imported}"
        problems = [
            found[room][other] for room, below in allowed.items() for other in sorted(found[room].keys() - below)
        ]
        problems += [
            f"{room} does not import {other}, which is listed for it"
            for room, below in allowed.items()
            for other in sorted(below - found[room].keys())
        ]
        try:
            TopologicalSorter(allowed).prepare()
        except CycleError as error:
            problems.append(f"a circle of rooms: {' -> '.join(error.args[1])}")
        return ContractCheck(kept=not problems, metadata={"problems": problems})

    def render_broken_contract(self, check: ContractCheck) -> None:
        for problem in check.metadata["problems"]:
            output.print_error(problem)


def _room_of(module: str, rooms: dict[str, set[str]]) -> str:
    module = module.removeprefix("offloop.")
    while module not in rooms and module:
        module = module.rpartition(".")[0]
    return module

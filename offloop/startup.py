"""Startup code of each Python process under ``offloop run``, which watches for imports of Transformers and Lightning.

``offloop run`` copies this file as ``sitecustomize`` into a folder at the head of ``PYTHONPATH``, so Python runs it,
also in child processes. It imports only modules that Python has already loaded: such a Python may lack offloop."""

import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

FRAMEWORKS = {
    "transformers.trainer": "Transformers",
    "lightning.pytorch.trainer.trainer": "Lightning",
    "pytorch_lightning.trainer.trainer": "Lightning",
}  # modules whose import is noted, with the name for the user
NOTES = "notes"  # file beside this one with the processes' notes, one per line

_FOLDER = os.path.dirname(os.path.abspath(__file__))


def note(line: str, folder: str = _FOLDER) -> None:
    """Append a line to the notes, unless ``offloop run`` has ended and removed the folder."""
    try:
        with open(os.path.join(folder, NOTES), "a") as file:
            file.write(f"{line}\n")
    except OSError:
        pass


class _Finder:
    """Finds modules by the other finders, and calls :func:`_loaded` after their import."""

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in FRAMEWORKS:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next((spec for one in others if (spec := one.find_spec(name, path, target)) is not None), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _loaded(name, module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _loaded(name: str, module: ModuleType) -> None:
    note(FRAMEWORKS[name])
    try:
        from offloop.automatic import attach_to_transformers
    except ModuleNotFoundError:
        note(f"missing {sys.executable}")
    except Exception as error:  # noqa: BLE001
        from offloop.bus.printing import say

        say(f"offloop is not attached: {error}", err=True)
    else:
        if name == "transformers.trainer":
            attach_to_transformers(module)


def _run_hidden_sitecustomize() -> None:
    spec = PathFinder.find_spec("sitecustomize", [folder for folder in sys.path if os.path.abspath(folder) != _FOLDER])
    if spec is not None and spec.loader is not None:
        from importlib.util import module_from_spec

        sys.modules["sitecustomize"] = module = module_from_spec(spec)
        spec.loader.exec_module(module)


if __name__ == "sitecustomize":
    note("python")
    sys.meta_path.insert(0, _Finder())
    _run_hidden_sitecustomize()

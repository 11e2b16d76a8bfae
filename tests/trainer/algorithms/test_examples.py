"""Every algorithm comes with an example, and each example trains."""

import inspect
import pkgutil
import textwrap
from importlib import import_module

import pytest

import offloop.trainer.algorithms as package
from offloop.trainer import Algorithm


def algorithms() -> list[type[Algorithm]]:
    """The classes that can be handed to a trainer, each once, from the modules that define them."""
    names = [module.name for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}.")]
    return [
        member
        for name in names
        for _, member in inspect.getmembers(import_module(name), inspect.isclass)
        if issubclass(member, Algorithm) and member.__module__ == name and not inspect.isabstract(member)
    ]


def example_of(algorithm: type[Algorithm]) -> str:
    """The indented block after ``Example::`` in the docstring; empty without one."""
    _, _, rest = (inspect.getdoc(algorithm) or "").partition("Example::\n")
    lines = []
    for line in rest.splitlines():
        if line and not line.startswith(" "):
            break
        lines.append(line)
    return textwrap.dedent("\n".join(lines)).strip()


@pytest.mark.parametrize("algorithm", algorithms(), ids=lambda algorithm: algorithm.__name__)
def test_the_example_of_an_algorithm_trains(algorithm: type[Algorithm]) -> None:
    example = example_of(algorithm)
    assert example.endswith("trainer.fit()"), f"{algorithm.__name__} has no example that ends with trainer.fit()"
    assert f"{algorithm.__name__}(" in example
    names: dict[str, object] = {}
    exec(example, names)
    state = names["trainer"].state  # type: ignore[attr-defined]
    assert state.reached_max_duration()
    assert state.batch_loss.isfinite()

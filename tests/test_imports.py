"""A laptop that watches a cluster has the base install only: no torch, nothing of the other extras."""

import subprocess
import sys

import pytest

IMPORT_WITHOUT_EXTRAS = """
import importlib, pkgutil, sys

class Absent:
    names = {"torch", "torchmetrics", "safetensors", "cloudpickle", "sklearn", "numpy", "psutil", "pytest", "rich"}
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
package = importlib.import_module(sys.argv[1])
names = [package.__name__] + [
    module.name
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + ".")
    # What only pytest loads needs pytest.
    if not module.name.endswith("__main__") and module.name != "offloop.pytest_plugin"
]
for name in names:
    importlib.import_module(name)
print(*names)
present = Absent.names & set(sys.modules)
assert not present, present
"""


@pytest.mark.parametrize("package", ["bus", "consumers", "offloop"])
def test_every_module_imports_without_the_extras(package):
    result = subprocess.run([sys.executable, "-c", IMPORT_WITHOUT_EXTRAS, package], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.split()) >= 3


@pytest.mark.parametrize("package", ["bus", "consumers", "offloop"])
def test_importing_a_package_does_not_load_torch(package):
    code = f"import sys, {package}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0

"""Makes a folder in which Python finds MosaicML Composer: ``python make_composer.py FOLDER``.

Composer wants an older torch than the one here, which has several gigabytes with all that comes with it. It trains
with the one here as well. Of what it imports, two packages that no training needs are stood in for: torchvision, which
has to fit to torch exactly, and the client of a cloud.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGES = ["mosaicml==0.32.1", "coolname==5.0.0", "py-cpuinfo==9.0.0", "tabulate==0.9.0", "torch_optimizer==0.3.0"]
STAND_IN = """
import sys
import types
from importlib.machinery import ModuleSpec


def _anything(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})


for _name in ("models", "models.resnet", "ops", "transforms", "transforms.functional", "datasets", "utils"):
    _module = sys.modules[f"torchvision.{_name}"] = types.ModuleType(f"torchvision.{_name}")
    _module.__path__, _module.__spec__, _module.__getattr__ = [], ModuleSpec(_module.__name__, None), _anything
    _parent, _, _own = _module.__name__.rpartition(".")
    setattr(sys.modules[_parent], _own, _module)
"""


def make(folder: Path) -> None:
    """Makes the folder, or leaves nothing."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as made:
        # Their own wishes for versions are what cannot be met.
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", made, *PACKAGES]
        subprocess.run(install, check=True)
        for name, text in (("torchvision", STAND_IN), ("mcli", "")):
            (Path(made) / name).mkdir()
            (Path(made) / name / "__init__.py").write_text(text)
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(made, folder)


if __name__ == "__main__":
    make(Path(sys.argv[1]).resolve())

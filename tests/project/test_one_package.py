"""What is installed has one name at its top level: no file and no package of the user's own is in its way."""

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import yaml
from paths import ROOT

FOLDERS = ("bus", "consumers", "offloop", "trainer")


def run(folder: Path, *command: object) -> str:
    done = subprocess.run(
        [str(word) for word in command], cwd=folder, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_has_one_name_at_its_top_level_and_every_file(tmp_path: Path) -> None:
    source = tmp_path / "source"
    tracked = run(ROOT, "git", "ls-files", *FOLDERS).split()
    for name in [*tracked, "pyproject.toml", "README.md", "LICENSE"]:
        to = source / name
        to.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_symlink():
            to.symlink_to(os.readlink(ROOT / name))
        else:
            to.write_bytes((ROOT / name).read_bytes())
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation")
    run(tmp_path, *pip, "--wheel-dir", tmp_path, source)
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info" not in name}
    # The other folders are links within the package.
    # A licence is among the metadata.
    files = {
        name if name.startswith("offloop/") else f"offloop/{name}" for name in tracked if not name.endswith("LICENSE")
    }
    assert names == files - {f"offloop/{name}" for name in FOLDERS}


def test_the_conda_package_is_that_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    recipe = yaml.safe_load((ROOT / "packaging" / "recipe.yaml").read_text())
    context, build, requirements = recipe["context"], recipe["build"], recipe["requirements"]
    assert (context["version"], f">={context['python_min']}") == (project["version"], project["requires-python"])
    named = {"msgpack": "msgpack-python"}
    needed = [
        re.sub(r"^([\w-]+)(.*)", lambda one: f"{named.get(one[1], one[1])} {one[2]}", one)
        for one in project["dependencies"]
    ]
    assert requirements["run"][1:] == needed
    assert build["python"]["entry_points"] == [f"{name} = {place}" for name, place in project["scripts"].items()]
    assert recipe["about"]["license"] == project["license"]

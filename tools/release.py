"""Builds a release into ``dist/``, and tries it: ``make release``.

Builds wheel and source distribution of the last commit twice and compares them, checks them and their types, installs
the wheel into empty environments of each Python that is here, runs commands and tests there, and writes a list of what
is installed (SBOM, CycloneDX) and ``SHA256SUMS``. Uploads nothing. Needs git and the environment of ``make setup``."""

import argparse
import gzip
import hashlib
import io
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
UV = str(BIN / "uv")
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
EXTRAS = ("", "trainer", "dashboard", "nats")
ALL = "alerts,dashboard,demo,nats,system"
TOOLS = {
    "twine": "twine==7.0.0",
    "check-wheel-contents": "check-wheel-contents==0.6.3",
    "cyclonedx-py": "cyclonedx-bom==7.5.0",
}
TESTS = ("tests/test_end_to_end.py", "tests/bus/publisher", "tests/bus/recording", "tests/consumers/callbacks")
LEFT_OUT = "tests/consumers/callbacks/test_export.py"  # needs the extra export, which is large
FOR_TESTS = ("pytest", "pytest-asyncio", "pytest-timeout", "pytest-xdist", "hypothesis", "psutil")
PYRIGHT = "pyright==1.1.414"
START_SECONDS = 0.2
# Adapters of frameworks that declare no types, or whose base class is known only at run time.
UNTYPED = re.compile(r"offloop\.(accelerate|composer|keras|lightning)\b")

_began = time.monotonic()


def step(text: str) -> None:
    seconds = round(time.monotonic() - _began)
    print(f"\n== {seconds // 60}:{seconds % 60:02} {text}", flush=True)


def run(*command: object, cwd: Path | None = None, **environment: str) -> str:
    """Run a command; return its output. Exit with the output if it fails."""
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=os.environ | environment, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"{done.stdout}{done.stderr}\nfailed: {' '.join(map(str, command))}")
    return done.stdout


def tool(name: str, *arguments: object) -> str:
    return run(UV, "tool", "run", "--from", TOOLS[name], name, *arguments)


def find_python(version: str) -> str | None:
    """Return the interpreter of a version, on the path or in pyenv."""
    installed = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions").glob(f"{version}.*/bin/python")
    for python in (shutil.which(f"python{version}"), *map(str, sorted(installed))):
        # What is on the path may be pyenv's, for a version that is not chosen here.
        if python and subprocess.run([python, "--version"], capture_output=True).returncode == 0:
            return python
    return None


def with_absolute_links(readme: str, repository: str, version: str) -> str:
    """Return the README for the package index, where links that are relative to the repository do not work."""
    targets = {"!": f"{repository}/raw/v{version}/", "": f"{repository}/blob/v{version}/"}
    pattern = re.compile(r"(!?)(\[[^\]]*\]\()(?!https?:|#)")
    return pattern.sub(lambda found: found[1] + found[2] + targets[found[1]], readme)


def build(folder: Path, version: str, repository: str | None) -> list[Path]:
    """Build wheel and source distribution of the last commit; return them."""
    source, built = folder / "source", folder / "dist"
    source.mkdir(parents=True)
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as packed:
        packed.extractall(source, filter="tar")
    if repository is not None:
        readme = source / "README.md"
        readme.write_text(with_absolute_links(readme.read_text(), repository, version))
    epoch = run("git", "log", "-1", "--format=%ct", cwd=ROOT).strip()
    command = (UV, "build", "--quiet", "--no-create-gitignore", "--no-build-isolation", "--python", sys.executable)
    run(*command, "--out-dir", built, cwd=source, SOURCE_DATE_EPOCH=epoch)
    for path in built.glob("*.tar.gz"):
        normalize(path, int(epoch))
    return sorted(built.iterdir())


def normalize(path: Path, epoch: int) -> None:
    """Write a source distribution again with one time, one owner and in one order."""
    content = io.BytesIO()
    with tarfile.open(path) as before, tarfile.open(fileobj=content, mode="w") as after:
        for member in sorted(before.getmembers(), key=lambda one: one.name):
            member.mtime, member.uid, member.gid, member.uname, member.gname = epoch, 0, 0, "", ""
            member.pax_headers = {}
            after.addfile(member, before.extractfile(member) if member.isfile() else None)
    path.write_bytes(gzip.compress(content.getvalue(), mtime=0))


def check(files: list[Path], version: str) -> None:
    tool("twine", "check", "--strict", *files)
    wheel = next(path for path in files if path.suffix == ".whl")
    tool("check-wheel-contents", wheel)
    if not re.search(rf"^## \[({re.escape(version)}|Unreleased)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE):
        sys.exit(f"CHANGELOG.md has no section for {version}")


def environment(folder: Path, python: str, *requirements: object) -> Path:
    """Make an environment; return its folder of programs."""
    run(UV, "venv", "--quiet", "--python", python, folder)
    run(UV, "pip", "install", "--quiet", "--python", folder / "bin" / "python", *requirements)
    return folder / "bin"


def lowest(python: str, folder: Path) -> Path:
    """Return a file with the lowest version of each direct dependency."""
    path = folder / "lowest.txt"
    extras = [part for extra in ALL.split(",") for part in ("--extra", extra)]
    command = (UV, "pip", "compile", "--quiet", "--resolution", "lowest-direct", "--python-version", python)
    run(*command, *extras, ROOT / "pyproject.toml", "-o", path)
    return path


def try_base(programs: Path, folder: Path, version: str) -> None:
    """Try what every installation has: commands and a run, without torch."""
    if version not in run(programs / "offloop", "--version"):
        sys.exit(f"{programs} has another version than {version}")
    seconds = []
    for _ in range(7):
        began = time.perf_counter()
        run(programs / "offloop", "--help")
        seconds.append(time.perf_counter() - began)
    print(f"offloop --help: {statistics.median(seconds):.2f} s (at most {START_SECONDS} s on an idle machine)")
    program = "from offloop import Publisher\nwith Publisher('base') as p: p.publish('batch_end', batch=1, loss=0.5)"
    run(programs / "python", "-c", program, cwd=folder)
    shown = run(programs / "consumer", "--replay", "base", "--callbacks", "metrics", "--log", "jsonl", cwd=folder)
    run(programs / "offloop", "show", "base", cwd=folder)
    if not (folder / "runs" / "base" / "metrics.jsonl").exists():
        sys.exit(f"the replay wrote no metrics: {shown}")


def try_trainer(programs: Path, folder: Path) -> None:
    """Run the commands of the README."""
    run(programs / "trainer", "digits", "--max-duration", "2ep", "--run-name", "digits", cwd=folder)
    run(programs / "consumer", "--replay", "digits", "--callbacks", "speed,lr", cwd=folder)
    run(programs / "offloop", "export", "digits", "--to", "csv", cwd=folder)
    run(programs / "offloop", "runs", cwd=folder)


def try_tests(programs: Path, folder: Path) -> None:
    """Run a selection of the tests against the installed package: beside them is no other."""
    copied = folder / "project"
    shutil.copytree(ROOT / "tests", copied / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", copied)
    workers = str(os.cpu_count())
    print(
        run(
            programs / "python",
            "-m",
            "pytest",
            "-n",
            workers,
            "-m",
            "not slow",
            f"--ignore={LEFT_OUT}",
            *TESTS,
            cwd=copied,
        )[-200:]
    )


def try_types(wheel: Path, folder: Path) -> None:
    """Check that a user's type checkers know the type of every public name, and accept the examples of the pages."""
    programs = environment(folder, sys.executable, PYRIGHT)  # it looks at the first environment of the path
    run(UV, "pip", "install", "--quiet", "--python", programs / "python", "--no-deps", wheel)
    site = next(folder.glob("lib/python*/site-packages"))
    (site / "development.pth").write_text(sysconfig.get_path("purelib"))  # frameworks, and what the extras need
    command = (programs / "pyright", "--verifytypes", "offloop", "--ignoreexternal", "--outputjson")
    here = {"VIRTUAL_ENV": str(folder), "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(command, cwd=folder, env=os.environ | here, capture_output=True, text=True)
    symbols = [one for one in json.loads(done.stdout)["typeCompleteness"]["symbols"] if one["isExported"]]
    if not symbols:
        sys.exit(f"pyright found no public names: {done.stdout}")
    unknown = [one["name"] for one in symbols if one["isTypeAmbiguous"] or not one["isTypeKnown"]]
    print(f"types of {len(symbols) - len(unknown):,} public names of {len(symbols):,} are declared")
    if wrong := [name for name in unknown if not UNTYPED.match(name)]:
        sys.exit(f"declare the types of {', '.join(wrong)}")
    sys.path.append(str(ROOT / "tests" / "support"))
    from documents import write_typed_blocks

    files = write_typed_blocks(folder)
    for checker in ([programs / "pyright"], [BIN / "mypy", "--strict", "--python-executable", programs / "python"]):
        print(run(*checker, *files, cwd=folder, **here), end="")


def try_everywhere(wheel: Path, version: str, scratch: Path) -> Path:
    """Try the wheel in empty environments; return the Python of a plain one."""
    pythons = {one: python for one in PYTHONS if (python := find_python(one))}
    print(f"Python {', '.join(pythons)}; not on this machine: {', '.join({*PYTHONS} - {*pythons}) or 'none'}")
    for name, python in pythons.items():
        for extra in EXTRAS:
            step(f"Python {name}, offloop{extra and f'[{extra}]'}")
            folder = scratch / f"{name}-{extra or 'plain'}"
            programs = environment(folder / "venv", python, f"offloop[{extra}] @ {wheel.as_uri()}" if extra else wheel)
            try_base(programs, folder, version)
            if (extra == "trainer") != ("torch " in run(UV, "pip", "list", "--python", programs / "python")):
                sys.exit("torch comes with the extra trainer alone")
    lowest_name, newest_name = next(iter(pythons)), list(pythons)[-1]
    for which, name, more in (
        ("newest", newest_name, ()),
        ("lowest", lowest_name, ("-r", lowest(lowest_name, scratch))),
    ):
        step(f"Python {name}, {ALL}, {which} dependencies: commands and tests")
        folder = scratch / which
        programs = environment(folder / "venv", pythons[name], *more, f"offloop[{ALL}] @ {wheel.as_uri()}", *FOR_TESTS)
        try_trainer(programs, folder)
        try_tests(programs, folder)
    return scratch / f"{newest_name}-plain" / "venv" / "bin" / "python"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of what is built; default: dist")
    out: Path = parser.parse_args().out
    os.umask(0o022)
    if changed := run("git", "status", "--porcelain", cwd=ROOT):
        sys.exit(f"commit or remove first what differs from the last commit:\n{changed}")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    version, repository = project["version"], project.get("urls", {}).get("Repository")
    if repository is None:
        print("pyproject.toml has no project.urls.Repository: the README's links will not work at the package index")
    with tempfile.TemporaryDirectory(prefix="offloop-release-") as name:
        scratch = Path(name)
        step(f"build {version} twice")
        files, again = (build(scratch / one, version, repository) for one in ("1", "2"))
        for one, other in zip(files, again, strict=True):
            if one.read_bytes() != other.read_bytes():
                sys.exit(f"{one.name} differs between two builds")
        step("check")
        check(files, version)
        wheel = next(path for path in files if path.suffix == ".whl")
        step("types of the installed package")
        try_types(wheel, scratch / "types")
        plain = try_everywhere(wheel, version, scratch)
        step("list what is installed")
        sbom = scratch / f"offloop-{version}.cdx.json"
        tool("cyclonedx-py", "environment", plain, "--output-reproducible", "--output-file", sbom)
        out.mkdir(parents=True, exist_ok=True)
        sums = ""
        for path in (*files, sbom):
            shutil.copy(path, out)
            sums += f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n"
        (out / "SHA256SUMS").write_text(sums)
        step(f"done: {out}")
        print(sums, end="")


if __name__ == "__main__":
    main()

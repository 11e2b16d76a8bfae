"""Fixtures for every test: a directory for runs, and no test may leave processes or sockets behind. Marks for slow
tests, and for those that need a program: these are left out where it is not installed."""

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paths import FOLDERS, TESTS

# Two tests' worth of threads on a small machine only get in each other's way; also for the processes that tests start.
os.environ["OMP_NUM_THREADS"] = "1"

import psutil
import pytest
from hypothesis import settings
from leaks import LeakWatch, record_sockets

from offloop.bus.types.timeouts import Timeouts

if TYPE_CHECKING:
    from nats_servers import NatsServer

record_sockets()
# Examples take as long as they take on a busy machine, and are the same ones everywhere.
settings.load_profile("ci")
# Also where the tests were started in the background, by something that ignores it.
signal.signal(signal.SIGINT, signal.default_int_handler)

TOOLS = {
    "chromium": "apt-get install chromium fonts-dejavu-core",
    "nats-server": "apt-get install nats-server",
    "node": "apt-get install nodejs npm",
    "node_modules": "npm ci --ignore-scripts --prefix examples/node",
    "openssl": "apt-get install openssl",
    "composer": "make composer",
}
"""What ``@pytest.mark.needs`` may name, and what installs it on Debian: programs, the packages of
``examples/node``, and the folder in which Composer is. Debian's NATS server is meant, older than that of the tests."""
SLOW_FOLDERS = ("browser", "project", "system")
"""All tests in these are marked ``slow``."""

_notes = pytest.StashKey[dict[str, str]]()
"""Lines for the end of the summary: which tests were left out, and why."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-tools", action="store_true", help="fail if a program that tests need is not installed")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_notes] = {}
    config.addinivalue_line("markers", "needs(*programs): left out where one of these programs is not installed")
    config.addinivalue_line("markers", "slow: takes long, so 'make test' leaves it to 'make test-all'")
    config.addinivalue_line("markers", "gpu: needs a GPU, so it runs with 'make gpu' alone")
    config.addinivalue_line("markers", "soak: loads and kills for minutes, so it runs with 'make soak' alone")
    if _is_for_gpu(config) and not config.option.collectonly:
        _require_gpu()
    if config.getoption("all_tools") and (missing := [name for name in TOOLS if not _is_installed(name)]):
        raise pytest.UsageError(f"not all tests can run, {_how_to_install(missing)}")


def _is_for_gpu(config: pytest.Config) -> bool:
    return bool(config.option.markexpr == "gpu")


def _require_gpu() -> None:
    from offloop.bus.errors import ConfigurationError
    from offloop.trainer.device.device import get_device

    try:
        get_device("gpu")
    except ConfigurationError as error:
        raise pytest.UsageError(
            f"no GPU to test on ({error}): on a machine that has one, make gpu GPU_PYTHON=PATH with a Python whose "
            "torch has CUDA"
        ) from None


def pytest_report_header(config: pytest.Config) -> list[str]:
    if not _is_for_gpu(config) or config.option.collectonly:
        return []
    import torch

    return [f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}"]


def _how_to_install(missing: list[str]) -> str:
    return f"{' and '.join(missing)} not found: {'; '.join(TOOLS[name] for name in missing)}"


def _is_installed(name: str) -> bool:
    """A variable such as CHROMIUM names another program than the one of that name on the path."""
    return FOLDERS[name].exists() if name in FOLDERS else bool(shutil.which(os.environ.get(name.upper(), name)))


def pytest_itemcollected(item: pytest.Item) -> None:
    if item.path.relative_to(TESTS).parts[0] in SLOW_FOLDERS:
        item.add_marker("slow")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if _is_for_gpu(config):
        for item in on_gpu:
            # Which torch there is, and what it warns of, is not up to us there.
            item.add_marker(pytest.mark.filterwarnings("default"))
    elif on_gpu:
        _note(config, "gpu", f"{_tests(on_gpu, 'gpu ')} left for 'make gpu', on a machine with a GPU")
        config.hook.pytest_deselected(items=on_gpu)
        items[:] = [item for item in items if item not in on_gpu]
    soaks = [item for item in items if item.get_closest_marker("soak")]
    if soaks and config.option.markexpr != "soak":
        _note(config, "soak", f"{_tests(soaks, 'soak ')} left for 'make soak'")
        config.hook.pytest_deselected(items=soaks)
        items[:] = [item for item in items if item not in soaks]
    needs = [{name for marker in item.iter_markers("needs") for name in marker.args} for item in items]
    missing = sorted(name for name in set().union(*needs) if not _is_installed(name))
    left_out = [item for item, needed in zip(items, needs, strict=True) if needed.intersection(missing)]
    if left_out:
        _note(config, "programs", f"{_tests(left_out)} left out, {_how_to_install(missing)}")
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def pytest_deselected(items: list[pytest.Item]) -> None:
    config = items[0].config
    # What -m leaves out comes after what -k leaves out, and before what needs programs.
    if config.option.markexpr == "not slow" and all(item.get_closest_marker("slow") for item in items):
        _note(config, "slow", f"{_tests(items, 'slow ')} left for 'make test-all'")


def _tests(items: list[pytest.Item], kind: str = "") -> str:
    return f"{len(items)} {kind}test{'s' if len(items) > 1 else ''}"


def _note(config: pytest.Config, about: str, line: str) -> None:
    config.stash[_notes][about] = line
    # Where several processes run the tests, another one ends with the summary.
    if hasattr(config, "workeroutput"):
        config.workeroutput["notes"] = config.stash[_notes]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    node.config.stash[_notes].update(getattr(node, "workeroutput", {}).get("notes", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for line in config.stash[_notes].values():
        terminalreporter.write_line(line)


@pytest.fixture(autouse=True)
def _one_torch_thread() -> None:
    """Results stay the same from machine to machine; torch itself is only loaded by tests that need it."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _scratch() -> Iterator[Path]:
    """The test's own directory, not made yet. Fails the test if it left processes or sockets behind.

    Its name is short because the path of a Unix socket has at most 107 bytes. It is also how processes of this test are
    recognised: it is in the environment that they inherit."""
    scratch = Path(tempfile.mkdtemp(prefix="ol-", dir="/tmp"))
    watch = LeakWatch(scratch.name, grace=15)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("OFFLOOP_TEST", scratch.name)
        # On a busy machine a broker may take longer to come back than a training is to wait for it.
        environment.setattr(Timeouts, "default", Timeouts(flush=30.0))
        yield scratch
    processes, sockets = watch.processes(), watch.sockets()
    leaked = [_describe(process) for process in processes] + [f"an open socket: {socket!r}" for socket in sockets]
    watch.kill(processes)
    for socket in sockets:
        socket.close(linger=0)
    shutil.rmtree(scratch)
    if leaked:
        pytest.fail("the test left behind " + "; ".join(leaked), pytrace=False)


@pytest.fixture
def runs_dir(_scratch: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory for runs with a short path, which every command and class uses unless told otherwise."""
    monkeypatch.setenv("OFFLOOP_RUNS_DIR", str(_scratch))
    return _scratch


@pytest.fixture
def nats_server(tmp_path: Path) -> Iterator["NatsServer"]:
    """A NATS server with JetStream."""
    from nats_servers import NatsServer

    folder = tmp_path / "nats"
    folder.mkdir()
    server = NatsServer(folder)
    yield server
    server.kill()


def _describe(process: psutil.Process) -> str:
    try:
        return f"process {process.pid} ({' '.join(process.cmdline())})"
    except psutil.NoSuchProcess:
        return f"process {process.pid}"

"""Fixtures for every test: a directory for runs, and no test may leave processes or sockets behind. Marks for slow
tests, and for those that need a program: these are left out where it is not installed."""

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

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
    "lowest": "make .venv/lowest",
}
"""What ``@pytest.mark.needs`` may name, and what installs it on Debian: programs, the packages of
``examples/node``, and the folders of Composer and of lowest versions. Debian's NATS server is meant, older than that of
the tests."""
SLOW_FOLDERS = ("browser", "project", "system")
"""All tests in these are marked ``slow``."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-tools", action="store_true", help="fail if a program that tests need is not installed")


def pytest_configure(config: pytest.Config) -> None:
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
    kind = config.option.markexpr
    missing = {name for name in TOOLS if not _is_installed(name)}

    def is_left_out(item: pytest.Item) -> bool:
        if any((item.get_closest_marker(name) and kind != name) for name in ("gpu", "soak")):
            return True
        return any(missing.intersection(marker.args) for marker in item.iter_markers("needs"))

    if left_out := [item for item in items if is_left_out(item)]:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    for item in items:
        if item.get_closest_marker("gpu"):
            # Which torch there is, and what it warns of, is not up to us there.
            item.add_marker(pytest.mark.filterwarnings("default"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if missing := [name for name in TOOLS if not _is_installed(name)]:
        terminalreporter.write_line(f"without tests of {_how_to_install(missing)}")


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
    watch = LeakWatch(scratch.name, grace=60)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("OFFLOOP_TEST", scratch.name)
        # On a busy machine a broker may take longer to come back than a training is to wait for it.
        environment.setattr(Timeouts, "default", Timeouts(flush=60.0, broker_exit=10.0))
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

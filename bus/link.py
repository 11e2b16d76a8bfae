"""How a publisher comes by its broker: it starts one in the run's directory, or joins one that stands alone."""

import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import zmq

from bus import errors
from bus.errors import BrokerError, ConfigurationError, OffloopError, ProtocolError
from bus.event import Event
from bus.runs import SOCKET_FILES, new_run_name, runs_dir, socket_address
from bus.wire import Control, check_run_name, decode_control, encode_control, split_frame

__all__ = ["BrokerLink", "connect", "describe_process", "python_path"]

START_PATIENCE = 20.0
WELCOME_PATIENCE = 10.0
EXIT_PATIENCE = 3.0
SEND_QUEUE = 1000


class BrokerLink:
    """A connection to a broker that has said ``welcome``, and the broker's process when it is ours.

    It stays until :meth:`close`, also when nobody holds it any more."""

    def __init__(self, address: str, hello: dict[str, Any], process: "subprocess.Popen[bytes] | None" = None) -> None:
        self.run_name: str = hello["run"]
        self.address = address
        self.process = process
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.SNDHWM, SEND_QUEUE)
        self.socket.setsockopt(zmq.RECONNECT_IVL, 50)
        # The broker knows a publisher by this name, so that it stays the same one through a reconnect.
        self.socket.setsockopt(zmq.IDENTITY, b"p" + os.urandom(16))
        try:
            self.socket.connect(address)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigurationError(
                f"{address!r} is not an address of a broker ({error.strerror}): use one like tcp://127.0.0.1:5570"
            ) from None
        try:
            self.welcome = self._greet(address, hello)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        _open_links.add(self)

    def _greet(self, address: str, hello: dict[str, Any]) -> dict[str, Any]:
        self.socket.send(encode_control("hello", hello))
        deadline = time.monotonic() + WELCOME_PATIENCE
        while self.socket.poll(max(0, int(1000 * (deadline - time.monotonic())))):
            message = self.receive()
            if message is None:
                continue
            if message.kind == "welcome":
                return message.content
            if message.kind == "refused":
                raise _refusal(message.content)
        raise BrokerError(
            f"no broker answers at {address}: start one with 'bus broker --listen ADDRESS', "
            "or name none to have one started"
        )

    def receive(self) -> Control | None:
        """The next message from the broker; ``None`` when there is none now, or it makes no sense."""
        # Asking first costs a third of a receive that finds nothing.
        if not int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            return None
        try:
            topic, body = split_frame(self.socket.recv(zmq.NOBLOCK))
            return decode_control(body) if topic is None else None
        except (zmq.Again, ProtocolError):
            return None

    def broker_ended(self) -> str | None:
        """How our own broker's process ended, if it has."""
        code = self.process.poll() if self.process else None
        if code is None:
            return None
        return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"

    def close(self) -> None:
        """Closes the connection, and waits a moment for a broker of ours to finish the record."""
        _open_links.discard(self)
        self._context.destroy(linger=0)
        if self.process is None:
            return
        try:
            self.process.wait(EXIT_PATIENCE)
        except subprocess.TimeoutExpired:
            # It goes on without us; being told so keeps Popen from warning about it.
            self.process.returncode = 0


# The garbage collector makes a context forget its sockets before anything can close them, and the context then waits
# for them for ever. What is held here it does not collect, and a publisher in a cycle can still close it.
_open_links: set[BrokerLink] = set()


def connect(
    run_name: str | None,
    where: str | os.PathLike[str] | None,
    broker: str | None,
    rank: int,
    world_size: int,
    info: dict[str, Any],
    events: Iterable[Event],
) -> BrokerLink:
    """Joins the broker at ``broker``, or starts one in the run's directory.

    Raises:
        OffloopError: one of its errors that says why that did not work.
    """
    name = check_run_name(run_name) if run_name is not None else new_run_name("run", where)
    if not 0 <= rank < world_size:
        raise ConfigurationError(f"rank is {rank} and world_size {world_size}: ranks go from 0 to world_size - 1")
    hello = {
        "run": name,
        "rank": rank,
        "world_size": world_size,
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "info": {**describe_process(), **info},
        "events": sorted(event.value for event in events),
    }
    try:
        encode_control("hello", hello)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigurationError(
            f"what is to be written down about the run cannot be ({error}): use numbers, text, lists, maps and None"
        ) from None
    if broker is not None:
        return BrokerLink(broker, hello)
    if rank > 0:
        raise ConfigurationError(
            f"rank {rank} needs the address of its run's broker: rank 0 starts one and has it as Publisher.address, "
            "or start 'bus broker' for all of them; name it with broker="
        )
    root = runs_dir(where).absolute()
    address = socket_address(root / name / SOCKET_FILES[0])
    process = _start_broker(root, name)
    try:
        return BrokerLink(address, hello, process)
    except BaseException:
        process.kill()
        process.wait()
        raise


def _start_broker(root: Path, name: str) -> "subprocess.Popen[bytes]":
    # A session of its own: Ctrl-C in the terminal ends the trainer, and the broker then finishes the record.
    process = subprocess.Popen(
        # -P: what lies in the current folder must not take the place of a package.
        [sys.executable, "-P", "-m", "bus.broker_process", str(root), name],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": python_path()},
    )
    try:
        answer = _first_words(process)
    except BaseException:
        process.kill()
        process.wait()
        raise
    finally:
        for pipe in (process.stdout, process.stderr):
            assert pipe is not None  # asked for above
            pipe.close()
    if "error" in answer:
        process.wait()
        raise _named_error(answer["error"], answer["message"])
    return process


def python_path() -> str:
    """``PYTHONPATH`` for a process of ours, which has to find our packages also where they are not installed."""
    return os.pathsep.join(part for part in (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")) if part)


def _first_words(process: "subprocess.Popen[bytes]") -> dict[str, str]:
    """The line in which a new broker says that it is ready, or why it cannot be."""
    assert process.stdout is not None and process.stderr is not None  # noqa: PT018  they are pipes
    readable, _, _ = select.select([process.stdout], [], [], START_PATIENCE)
    line = process.stdout.readline() if readable else b""
    try:
        answer: dict[str, str] = json.loads(line)
    except ValueError:
        process.kill()
        *_, why = ["it said nothing", *process.stderr.read().decode(errors="replace").strip().splitlines()]
        raise BrokerError(f"the broker did not start: {why}") from None
    return answer


def _refusal(content: dict[str, Any]) -> OffloopError:
    return _named_error(str(content.get("error")), str(content.get("reason", "the broker refused without a reason")))


def _named_error(name: str, message: str) -> OffloopError:
    """The error of ours that a broker named, so that users catch the same one wherever it arose."""
    kind = getattr(errors, name, None) if name in errors.__all__ else None
    return kind(message) if kind is not None else BrokerError(message)


def describe_process() -> dict[str, Any]:
    """What ``run.json`` says about the program that publishes: command, folder, host, versions, git commit."""
    return {
        "command": sys.argv,
        "cwd": os.getcwd(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "python": sys.version.split()[0],
        "versions": {name: version for name in _PACKAGES if (version := _version(name))},
        "git_commit": _git("rev-parse", "HEAD"),
        "git_dirty": bool(_git("status", "--porcelain", "--untracked-files=no")),
    }


_PACKAGES = ("offloop", "torch", "torchmetrics", "numpy", "pyzmq", "msgpack", "mcap")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    """What git says of the current folder; ``None`` without git or outside a repository."""
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None

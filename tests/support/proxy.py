"""A broker that stands alone, and a network in front of it that a test can cut. Both are processes of their own.

As a program: ``python proxy.py LISTEN_HOST TARGET_HOST PORT...`` forwards each port from one address of this machine to
the same port of another, and takes its orders from standard input."""

import asyncio
import contextlib
import enum
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import TracebackType

from brokers import free_address

NEAR, FAR = "127.0.0.1", "127.0.0.2"


class StandingBroker:
    """``offloop server broker`` at a free pair of ports of this machine, with its runs in ``runs_dir``. It can be ended
    and started again."""

    def __init__(self, runs_dir: Path) -> None:
        self._runs_dir = runs_dir
        self.port = _free_pair()
        self.address = f"tcp://{NEAR}:{self.port}"
        self.start()

    def start(self) -> None:
        """Starts it, at the same address again if it was there before."""
        command = [
            sys.executable,
            "-m",
            "offloop.bus",
            "server",
            "broker",
            "--listen",
            self.address,
            "--runs-dir",
            str(self._runs_dir),
        ]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self._process.stdout is not None
        assert "serving at" in self._process.stdout.readline()

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    def end(self, how: signal.Signals) -> None:
        """Sends it a signal and waits until it is gone."""
        self._process.send_signal(how)
        self._process.communicate(timeout=100)

    def __enter__(self) -> "StandingBroker":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            self.end(signal.SIGTERM)


class Network:
    """Between whoever uses :attr:`address` and the standing broker at ``port``: both of its ports are forwarded, the
    stream's too, because a client expects it where the control endpoint is."""

    def __init__(self, port: int) -> None:
        self.address = f"tcp://{FAR}:{port}"
        command = [sys.executable, __file__, FAR, NEAR, str(port), str(port + 1)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        self.restore()

    def restore(self) -> None:
        """New connections are forwarded. Those that were swallowed stay dead, as behind a router that was replaced."""
        self._order(_Mode.FORWARD)

    def refuse(self) -> None:
        """Every connection is reset, and new ones are refused."""
        self._order(_Mode.REFUSE)

    def swallow(self) -> None:
        """Every connection stays open, new ones are taken, and nothing that is sent arrives."""
        self._order(_Mode.SWALLOW)

    def _order(self, mode: "_Mode") -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{mode.value}\n")
        assert self._process.stdout.readline() == "done\n"

    def __enter__(self) -> "Network":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.communicate(timeout=100)


def _free_pair() -> int:
    """A port that is free with the next one, at both addresses."""
    while True:
        port = int(free_address().rpartition(":")[2])
        with contextlib.suppress(OSError), socket.socket() as control, socket.socket() as stream:
            control.bind((FAR, port))
            stream.bind((FAR, port + 1))
            return port


class _Mode(enum.Enum):
    FORWARD = "forward"
    REFUSE = "refuse"
    SWALLOW = "swallow"


class _Forwarder:
    """The proxy's process."""

    def __init__(self, host: str, target: str, ports: list[int]) -> None:
        self._host = host
        self._target = target
        self._ports = ports
        self._servers: list[asyncio.Server] = []
        self._mode = _Mode.REFUSE
        self._dead: set[asyncio.StreamWriter] = set()
        self._open: set[asyncio.StreamWriter] = set()

    async def serve(self) -> None:
        """Takes orders until there are no more."""
        orders = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
        while order := (await orders.readline()).decode().strip():
            await self._change(_Mode(order))
            print("done", flush=True)
        # Connections that hang must not keep the process.
        os._exit(0)

    async def _change(self, mode: _Mode) -> None:
        self._mode = mode
        if mode is _Mode.REFUSE:
            for server in self._servers:
                server.close()
            self._servers.clear()
            for writer in self._open:
                writer.transport.abort()
        elif not self._servers:
            for port in self._ports:
                self._servers.append(await asyncio.start_server(self._take, self._host, port))
        if mode is _Mode.SWALLOW:
            self._dead |= self._open

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends = [(reader, writer)]
        if self._mode is _Mode.FORWARD:
            port = writer.get_extra_info("sockname")[1]
            try:
                ends.append(await asyncio.open_connection(self._target, port))
            except OSError:
                writer.transport.abort()
                return
        writers = [end[1] for end in ends]
        self._open.update(writers)
        if self._mode is _Mode.SWALLOW:
            self._dead.update(writers)
        await asyncio.gather(*(self._pump(ends[index][0], ends[index - 1][1]) for index in range(len(ends))))
        for one in writers:
            self._open.discard(one)
            self._dead.discard(one)
            one.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                if writer not in self._dead:
                    writer.write(data)
                    await writer.drain()
        # The other direction ends with this one, but nobody hears through a dead connection that it was closed.
        if writer not in self._dead:
            writer.transport.abort()


if __name__ == "__main__":
    asyncio.run(_Forwarder(sys.argv[1], sys.argv[2], [int(port) for port in sys.argv[3:]]).serve())

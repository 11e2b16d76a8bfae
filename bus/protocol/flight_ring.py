"""Memory of a flight recorder: a ring with one rank's newest events, read by the broker also if the rank hangs or dies.

It is shared memory: an event needs no message. It consists of a front and of blocks that are reused. A block is zeroed
and numbered when it is entered. An event in it is valid once its length is written. Numbers are little endian."""

import errno
import os
import struct
from collections import deque
from collections.abc import Iterator, Mapping
from mmap import mmap
from typing import Any

from offloop.bus.errors import ProtocolError
from offloop.bus.tensors import shared_memory

BLOCK = 64 * 1024
MEMORY = 256 * 1024 * 1024  # limit for all rings of one host, in bytes
MAX_BATCHES = 1_000_000

_MAGIC = b"OLFLIGHT"
_FRONT = struct.Struct("<8s16sQQQ")
"""Magic, token, batches to hold, number of blocks in use, index of the current block."""
_PLACES = struct.Struct("<QQ")
_AT_PLACES = 32
_AT_BLOCKS = 4096
_HEAD = 16
"""Bytes at the start of a block: its number among all blocks ever entered, and zeros. Lengths and frames follow."""
_LENGTH = struct.Struct("<I")
_NUMBER = struct.Struct("<Q")
_TOKEN = 16
_MAX_INTEGER = 1 << 31
_EMPTY = bytes(BLOCK - 8)
_GROW = 16  # blocks by which the memory grows
MAX_EVENT = BLOCK - _HEAD - _LENGTH.size  # size of the largest event that fits, in bytes


class FlightRing:
    """Writer, in a rank's process: holds the last ``batches`` batches in at most ``size`` bytes, if available."""

    def __init__(self, batches: int, size: int = MEMORY) -> None:
        self.batch = 0  # number of finished batches, updated by the caller
        self._batches = batches
        self._most = max(2, size // BLOCK)
        self._token = os.urandom(_TOKEN)
        whole = _AT_BLOCKS + self._most * BLOCK
        self._descriptor, self._shared = shared_memory.create_memory(whole, self._token, _AT_BLOCKS)
        try:
            self._memory = mmap(self._descriptor, whole)
            _FRONT.pack_into(self._memory, 0, _MAGIC, self._token, batches, 0, 0)
            self._made = self._entered = 0
            # Blocks in use, oldest first, each with the number of finished batches when it was left.
            self._blocks: deque[tuple[int, int]] = deque()
            self._at = self._end = 0
            self._enter_block()
        except BaseException:
            shared_memory.discard_memory(self._descriptor, self._token)
            raise

    def to_wire(self) -> dict[str, Any]:
        return {"fd": self._shared, "token": self._token}

    def put(self, frame: bytes) -> bool:
        """Write an event over the oldest ones; return false if it is too large."""
        at = self._at
        size = len(frame)
        end = at + 4 + size
        if end > self._end:
            if size > MAX_EVENT:
                return False
            at = self._enter_block()
            end = at + 4 + size
        self._memory[at + 4 : end] = frame
        _LENGTH.pack_into(self._memory, at, size)
        self._at = end
        return True

    def _enter_block(self) -> int:
        blocks, batch = self._blocks, self.batch
        if blocks:
            blocks[-1] = blocks[-1][0], batch
        if blocks and blocks[0][1] < batch - self._batches:
            index, _ = blocks.popleft()
        elif self._can_grow():
            index = self._made
            self._made += 1
        elif blocks:
            index, _ = blocks.popleft()
        else:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        blocks.append((index, batch))
        self._entered += 1
        begin = _AT_BLOCKS + index * BLOCK
        # The number is 0 meanwhile: a reader that finds different numbers before and after its read discards the block.
        _NUMBER.pack_into(self._memory, begin, 0)
        self._memory[begin + 8 : begin + BLOCK] = _EMPTY
        _NUMBER.pack_into(self._memory, begin, self._entered)
        # One assignment: pack_into() writes zeros first, which a reader could see.
        self._memory[_AT_PLACES : _AT_PLACES + _PLACES.size] = _PLACES.pack(self._made, index)
        self._at, self._end = begin + _HEAD, begin + BLOCK
        return self._at

    def _can_grow(self) -> bool:
        if self._made < self._most and not self._made % _GROW:
            try:
                more = min(_GROW, self._most - self._made)
                shared_memory.allocate_memory(self._descriptor, _AT_BLOCKS + self._made * BLOCK, more * BLOCK)
            except OSError:
                # Continue with the blocks in use.
                self._most = self._made
        return self._made < self._most

    def close(self) -> None:
        """Free the memory. A broker that has opened it keeps it."""
        if self._end:
            self._end = 0
            self._memory.close()
            shared_memory.discard_memory(self._descriptor, self._token)


class FlightRingReader:
    """Reader, at the broker: opens the ring of a process by :meth:`FlightRing.to_wire`.

    The memory exists while this is open, also after that process's end. It is read and not mapped: if its owner
    shortened a mapped memory, the broker would crash. ProtocolError means malformed memory."""

    def __init__(self, pid: int, wire: Mapping[str, Any]) -> None:
        shared, token = wire.get("fd"), wire.get("token")
        if type(shared) is not int or not -1 <= shared <= _MAX_INTEGER:
            raise ProtocolError("the flight recorder of a publisher has no descriptor")
        if not isinstance(token, bytes) or len(token) != _TOKEN:
            raise ProtocolError("the flight recorder of a publisher has no token")
        self.token = token
        self._descriptor = shared_memory.open_memory(pid, shared, token)
        try:
            self.batches: int = self._front()[0]
        except BaseException:
            os.close(self._descriptor)
            raise

    def _front(self) -> tuple[int, int, int]:
        data = os.pread(self._descriptor, _FRONT.size, 0)
        if len(data) < _FRONT.size:
            raise ProtocolError("the memory of a flight recorder is too short")
        magic, token, batches, blocks, newest = _FRONT.unpack(data)
        if (magic, token) != (_MAGIC, self.token):
            raise ProtocolError("the memory that a publisher names is not its flight recorder")
        if not 1 <= batches <= MAX_BATCHES or not newest < blocks <= MEMORY // BLOCK:
            raise ProtocolError("the front of a flight recorder is malformed")
        return batches, blocks, newest

    def newest(self) -> bytes | None:
        """Return the newest event's frame, or ``None`` if its block is still empty."""
        *_, newest = self._front()
        return next(iter(deque(_frames_in(self._block(newest)), maxlen=1)), None)

    def copy(self) -> list[bytes]:
        """Return the frames in the ring, oldest first. Blocks that change meanwhile are left out."""
        _, count, newest = self._front()
        last = self._number(newest)
        shared_memory.check_available(count * BLOCK)
        found: dict[int, list[bytes]] = {}
        for index in range(count):
            data = self._block(index)
            number = _NUMBER.unpack_from(data)[0] if len(data) == BLOCK else 0
            if 0 < number <= last and number == self._number(index):
                found[number] = list(_frames_in(data))
        return [frame for number in sorted(found) for frame in found[number]]

    def _block(self, index: int) -> bytes:
        return os.pread(self._descriptor, BLOCK, _AT_BLOCKS + index * BLOCK)

    def _number(self, index: int) -> int:
        """Return a block's number among all blocks ever entered, or 0 while it is being entered."""
        data = os.pread(self._descriptor, _NUMBER.size, _AT_BLOCKS + index * BLOCK)
        return int.from_bytes(data, "little")

    def close(self) -> None:
        os.close(self._descriptor)


def _frames_in(block: bytes) -> Iterator[bytes]:
    at = _HEAD
    while at + _LENGTH.size < BLOCK:
        (size,) = _LENGTH.unpack_from(block, at)
        at += _LENGTH.size
        if not size or at + size > BLOCK:
            return
        yield block[at : at + size]
        at += size

import contextlib
import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import wait_for
from segment_jobs import filled, forker, reader, running, shared_memory_of, writer

from offloop.bus.errors import ClosedError, ConfigurationError, FieldNotAvailableError, ProtocolError
from offloop.bus.tensors import segments, shared_memory
from offloop.bus.tensors.segments import SegmentElsewhereError, SegmentPool, SegmentReference, open_segment

MIB = 1 << 20


@pytest.fixture
def pool() -> Iterator[SegmentPool]:
    """Two segments, and consumers that are quick."""
    pool = SegmentPool(2, is_handled=lambda seq, field: True)
    yield pool
    pool.close()


def opened(told: dict[str, Any] | None) -> memoryview:
    return open_segment(SegmentReference.from_wire(told))


def changed(told: dict[str, Any] | None, **changes: Any) -> SegmentReference:
    assert told is not None
    return SegmentReference.from_wire({**told, **changes})


def test_an_image_is_what_was_written_and_is_published_once(pool: SegmentPool) -> None:
    segment = pool.reserve(3 * MIB + 5, "weights")
    assert segment is not None
    assert len(segment.buffer) == 3 * MIB + 5
    image = os.urandom(3 * MIB + 5)
    segment.buffer[:] = image
    view = opened(segment.publish(1))
    assert view == image
    assert view.readonly
    segment.release()
    with pytest.raises(ClosedError, match="reserve another"):
        segment.publish(2)
    with pytest.raises(ConfigurationError):
        SegmentPool(0)


def test_unhandled_segments_are_kept_for_their_hold_time() -> None:
    handled: set[tuple[int, str]] = set()
    pool = SegmentPool(2, is_handled=lambda seq, field: (seq, field) in handled)
    first = filled(pool, MIB, 1)
    assert filled(pool, MIB, 2) is not None
    assert pool.reserve(MIB, "weights") is None
    assert pool.unhandled == 2
    assert set(bytes(opened(first))) == {1}
    handled.add((1, "weights"))
    assert pool.unhandled == 1
    assert filled(pool, MIB, 3) is not None
    assert pool.reserve(MIB, "weights") is None
    pool.close()
    hasty = SegmentPool(1, hold_seconds=0.0, is_handled=lambda seq, field: False)
    assert filled(hasty, MIB, 1) is not None
    wait_for(lambda: filled(hasty, MIB, 2), "the end of the time")
    hasty.close()


def test_reading_a_reused_segment_is_an_error(pool: SegmentPool) -> None:
    late = filled(pool, MIB, 1)
    being_filled = pool.reserve(MIB, "weights")
    assert being_filled is not None
    with pytest.raises(FieldNotAvailableError, match="read too late: the trainer has reused their memory"):
        opened(late)
    being_filled.release()
    with pytest.raises(FieldNotAvailableError, match="too late"):
        opened(late)
    assert filled(pool, MIB, 2) is not None
    with pytest.raises(FieldNotAvailableError, match="too late"):
        opened(late)


def test_the_smallest_segment_that_fits_is_used(pool: SegmentPool) -> None:
    large = filled(pool, 4 * MIB, 1)
    held = opened(large)
    filled(pool, MIB, 2)
    del held
    filled(pool, 5, 3)
    assert set(bytes(opened(large))) == {1}
    # There is no third one, so a larger one takes the place of the smallest.
    assert filled(pool, 9 * MIB, 4) is not None
    assert pool.size == 13 * MIB


def test_idle_memory_is_released(pool: SegmentPool, monkeypatch: pytest.MonkeyPatch) -> None:
    told = filled(pool, MIB, 1)
    held = opened(told)
    filled(pool, MIB, 2)
    pool.trim()
    assert pool.size == 2 * MIB
    monkeypatch.setattr(segments, "IDLE_SECONDS", -1.0)
    pool.trim()
    assert pool.size == MIB
    assert set(bytes(held)) == {1}
    del held
    pool.trim()
    assert pool.size == 0
    with pytest.raises(SegmentElsewhereError, match="gave it back"):
        opened(told)


def test_memory_being_allocated_delays_only_the_call_that_needs_it(
    pool: SegmentPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on, create = threading.Event(), segments.create_memory

    def create_slowly(size: int, token: bytes) -> tuple[int, int]:
        if threading.current_thread() is not threading.main_thread():
            assert may_go_on.wait(30)
        return create(size, token)

    monkeypatch.setattr(segments, "create_memory", create_slowly)
    pool.prepare(8 * MIB)
    assert filled(pool, MIB, 1) is not None
    assert pool.size == MIB
    # There are two segments at most, one of which is on its way.
    held = opened(filled(pool, MIB, 2))
    assert pool.reserve(2 * MIB, "outputs") is None
    threading.Timer(0.1, may_go_on.set).start()
    assert filled(pool, 7 * MIB, 3) is not None
    assert pool.size == 9 * MIB
    del held


def test_a_large_segment_is_allocated_for_a_later_call_while_the_one_that_needs_it_goes_on(
    pool: SegmentPool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    may_go_on, create = threading.Event(), segments.create_memory
    failures = [OSError("no memory")]

    def create_slowly(size: int, token: bytes) -> tuple[int, int]:
        assert threading.current_thread() is not threading.main_thread()
        assert may_go_on.wait(30)
        if failures:
            raise failures.pop()
        return create(size, token)

    monkeypatch.setattr(segments, "DEFER_BYTES", 2 * MIB)
    first = filled(pool, 2 * MIB, 1)
    held = opened(first)
    monkeypatch.setattr(segments, "create_memory", create_slowly)
    for _ in range(2):
        assert pool.reserve(3 * MIB, "checkpoint", defer=True) is None
    assert pool.is_allocating
    may_go_on.set()
    wait_for(lambda: not pool.is_allocating, "the memory")
    # Why it failed is reported when it is needed, and it is tried again.
    assert "no shared memory" not in caplog.text
    assert pool.reserve(3 * MIB, "checkpoint", defer=True) is None
    assert "no shared memory for 3145728 bytes: no memory" in caplog.text
    wait_for(lambda: not pool.is_allocating, "the memory")
    segment = pool.reserve(3 * MIB, "checkpoint", defer=True)
    assert segment is not None
    assert segment.capacity == 3 * MIB
    assert not pool.is_allocating
    del held


def test_memory_is_pinned_once_by_the_thread_that_gets_it_and_unpinned_before_it_goes() -> None:
    steps: list[str] = []

    def pin(memory: memoryview) -> Any:
        memory[-1] = 1  # it is there, and may be written to
        steps.append(threading.current_thread().name)
        return lambda: steps.append("unpinned")

    pool = SegmentPool(1, is_handled=lambda seq, field: True, pin=pin)
    pool.prepare(MIB)
    for seq in range(1, 4):
        filled(pool, MIB, seq)
    assert steps == ["offloop-segment"]
    pool.close()
    assert steps == ["offloop-segment", "unpinned"]


def test_too_large_segments_are_refused_and_reported(
    pool: SegmentPool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    (tmp_path / "memory.max").write_text(f"{10 * MIB}\n")
    (tmp_path / "memory.current").write_text(f"{8 * MIB}\n")
    (tmp_path / "memory.stat").write_text(f"anon 1\ninactive_file {MIB}\nactive_file 7\n")
    monkeypatch.setattr(shared_memory, "_CGROUP", tmp_path)
    assert shared_memory.memory_available() == 3 * MIB
    assert pool.reserve(3 * MIB, "weights") is None
    assert "no shared memory for 3145728 bytes" in caplog.text
    assert filled(pool, 2 * MIB, 1) is not None
    (tmp_path / "memory.max").write_text("max\n")
    assert 16 * MIB < shared_memory.memory_available() < 1 << 50


def test_views_of_the_memory_outlive_the_pool_and_nothing_else_does() -> None:
    pool = SegmentPool(2)
    pool.prepare(64 * MIB)
    segment = pool.reserve(MIB, "weights")
    assert segment is not None
    buffer = segment.buffer
    pool.close()
    buffer[:] = bytes(MIB)
    with pytest.raises(ClosedError):
        segment.publish(1)
    segment.release()
    del segment, buffer
    gc.collect()
    assert shared_memory_of(os.getpid()) == []


def test_a_killed_readers_lease_comes_back_at_once(pool: SegmentPool) -> None:
    with running(reader) as (process, pipe):
        for seq in (1, 2):
            pipe.send(filled(pool, MIB, seq))
            pipe.recv()
        assert pool.reserve(MIB, "weights") is None
        process.kill()
        process.join()
        assert filled(pool, MIB, 3) is not None
        assert filled(pool, MIB, 4) is not None


def test_a_reader_keeps_its_image_when_the_writer_is_killed() -> None:
    with running(writer, 2, MIB) as (process, pipe):
        pipe.send(5)
        told = pipe.recv()
        image = opened(told)
        process.kill()
        process.join()
        assert set(bytes(image)) == {5}
        with pytest.raises(SegmentElsewhereError, match="it has ended"):
            opened(told)
    # This map was the last thing that kept the memory.
    assert len(shared_memory_of(os.getpid())) == 2
    del image
    assert shared_memory_of(os.getpid()) == []
    assert [name for name in os.listdir("/dev/shm") if "segment" in name] == []


def test_a_fork_keeps_nothing() -> None:
    with running(forker) as (process, pipe):
        parent, told = pipe.recv()
        fork, found, reserved = pipe.recv()
        # The parent still fills the one that it has reserved, and everything else is as it was.
        assert set(bytes(opened(told))) == {1}
        assert len(shared_memory_of(parent)) >= 3
        assert found == []
        assert reserved is None
        process.kill()
        process.join()
        assert shared_memory_of(fork) == []
        with pytest.raises(SegmentElsewhereError):
            opened(told)
        pipe.send("go on")
        assert pipe.recv() == "all gone"


def test_no_reader_sees_halves_of_two_images() -> None:
    size, complete = 256 * 1024, 0
    with running(writer, 1, size) as (_, pipe):
        pipe.send(0)
        newest, told = 0, pipe.recv()
        for seq in range(1, 200):
            # Every other time the writer fills the segment again just when it is to be read.
            image = opened(told) if seq % 2 else None
            pipe.send(seq)
            with contextlib.suppress(FieldNotAvailableError):
                assert set(bytes(image or opened(told))) == {newest % 256}
                complete += 1
            del image
            published = pipe.recv()
            if published is not None:
                newest, told = seq, published
    assert complete >= 100


def test_other_descriptors_are_not_read(pool: SegmentPool, tmp_path: Path) -> None:
    told = filled(pool, MIB, 1)
    os.mkfifo(tmp_path / "fifo")
    opened_here = [
        os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK),  # to open it plainly waits for a writer
        os.open(tmp_path, os.O_RDONLY),
        os.open("/dev/zero", os.O_RDONLY),
        os.open(tmp_path / "short", os.O_CREAT | os.O_RDWR),
        os.memfd_create("another"),
    ]
    os.write(opened_here[-1], bytes(8192))
    before = len(os.listdir("/proc/self/fd"))
    for stranger in (*({"fd": one} for one in (*opened_here, 1 << 20)), {"token": bytes(16)}, {"pid": 1}):
        with pytest.raises(SegmentElsewhereError):
            open_segment(changed(told, **stranger))
    for other in ({"size": 2 * MIB}, {"size": 1}, {"number": 2}):
        with pytest.raises(FieldNotAvailableError, match="too late"):
            open_segment(changed(told, **other))
    assert len(os.listdir("/proc/self/fd")) == before
    for descriptor in opened_here:
        os.close(descriptor)


def test_invalid_references_are_refused(pool: SegmentPool) -> None:
    told = filled(pool, MIB, 1)
    wrong: dict[str, list[Any]] = {
        "pid": [0, -1, "self", 1 << 40, True],
        "fd": [-2, "../../../etc/passwd", 1 << 40],
        "token": [b"short", "0123456789abcdef"],
        "number": [0, 1 << 64],
        "size": [-1, 1 << 49, 1.0, None],
    }
    for name, value in ((name, value) for name, values in wrong.items() for value in values):
        with pytest.raises(ProtocolError, match="is not a reference to a segment"):
            changed(told, **{name: value})
    with pytest.raises(ProtocolError):
        SegmentReference.from_wire([1, 2, 3])


class TestWithoutMemfd:
    """Where the memory is a file."""

    @pytest.fixture(autouse=True)
    def folder(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
        monkeypatch.setattr(shared_memory, "HAS_MEMFD", False)
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        return tmp_path / f"offloop-segments-{os.getuid()}"

    def test_files_work_the_same_and_are_removed(self, folder: Path) -> None:
        pool = SegmentPool(1, is_handled=lambda seq, field: True)
        told = filled(pool, MIB, 9)
        assert told is not None
        assert told["fd"] == -1
        assert [path.stat().st_mode & 0o777 for path in (folder, *folder.iterdir())] == [0o700, 0o600]
        image = opened(told)
        assert set(bytes(image)) == {9}
        assert pool.reserve(MIB, "weights") is None
        pool.close()
        assert list(folder.iterdir()) == []
        assert set(bytes(image)) == {9}
        with pytest.raises(SegmentElsewhereError):
            opened(told)

    def test_files_of_a_killed_process_are_removed(self, folder: Path) -> None:
        pool = SegmentPool(2)
        filled(pool, MIB, 1)
        left = folder / f"{(1 << 22) + 1}-00"
        left.touch()
        filled(pool, MIB, 2)
        assert not left.exists()
        assert len(list(folder.iterdir())) == 2
        pool.close()

    def test_a_folder_writable_by_others_is_not_used(self, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
        folder.mkdir()
        folder.chmod(0o777)
        assert SegmentPool(1).reserve(MIB, "weights") is None
        assert "is not this user's alone" in caplog.text

"""Views that are saved beside the runs: what was saved is read, and what is no such file is said and left as it is."""

import errno
import fcntl
import os
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offloop.bus.errors import ConfigurationError, RunDirectoryError
from offloop.bus.index import saved_views
from offloop.bus.index.annotations import ANNOTATIONS_FILE, annotate
from offloop.bus.index.index import RunIndex
from offloop.bus.index.saved_views import MAX_ADDRESS, MAX_VIEWS, VIEWS_FILE, delete_view, read_views, save_view
from offloop.bus.runs.directory import list_runs

NAMES = st.text(st.characters(exclude_categories=("Cs", "Cc", "Cf", "Zl", "Zp", "Co", "Cn")), min_size=1, max_size=64)
ADDRESSES = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), max_size=200)


@given(st.lists(st.tuples(NAMES.filter(lambda name: name.strip().isprintable()), ADDRESSES, st.booleans()), max_size=8))
def test_what_is_saved_and_not_deleted_is_read_by_anybody(changes: list[tuple[str, str, bool]]) -> None:
    expected: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name, address, stays in changes:
            if not name.strip():
                continue
            expected[name.strip()] = address
            assert save_view(folder, name, address) == expected
            if not stays:
                del expected[name.strip()]
                assert delete_view(folder, name.strip()) == expected
        assert read_views(folder) == expected
        assert set(os.listdir(folder)) <= {VIEWS_FILE}
        assert not list_runs(folder)
        with RunIndex(folder) as index:
            index.refresh()
            assert not index.entries


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'{"other": 1}',
        b'{"views": {"a": 1}}',
        b'{"views": {"a": "with blank"}}',
        b'{"views": {"\\u001b[31m": "x"}}',
        b'{"views": {"a": "' + b"x" * (MAX_ADDRESS + 1) + b'"}}',
        b'{"views": {' + b", ".join(b'"%d": "x"' % number for number in range(MAX_VIEWS + 1)) + b"}}",
        b'{"views": {}}' + b" " * (1 << 20),
        b"[" * 100_000,
        b"\xff\xfe",
        None,
    ],
)
def test_a_file_that_is_damaged_or_of_others_is_said_and_stays_as_it_is(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / VIEWS_FILE
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    for change in (
        lambda: read_views(tmp_path),
        lambda: save_view(tmp_path, "mine", "find=lr"),
        lambda: delete_view(tmp_path, "a"),
    ):
        with pytest.raises(RunDirectoryError, match=r"views\.json") as raised:
            change()
        assert str(raised.value).isprintable()
    assert path.is_dir() if content is None else path.read_bytes() == content


@pytest.mark.parametrize("name", ["", "  ", "x" * 65, "two\nlines", "\u202ename"])
def test_names_that_are_not_allowed_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigurationError, match="is not a name for a view: use 1 to 64"):
        save_view(tmp_path, name, "find=lr")
    assert not os.listdir(tmp_path)


def test_views_are_bounded_in_size_and_number(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="4,001 characters cannot be saved"):
        save_view(tmp_path, "long", "x" * (MAX_ADDRESS + 1))
    for number in range(MAX_VIEWS):
        save_view(tmp_path, f"view {number}", "x" * MAX_ADDRESS)
    with pytest.raises(ConfigurationError, match="delete one first"):
        save_view(tmp_path, "one more", "x")
    save_view(tmp_path, "view 7", "y")
    assert read_views(tmp_path)["view 7"] == "y"


def test_a_folder_that_cannot_be_written_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RunDirectoryError, match=r"missing/views\.json cannot be written: No such file"):
        save_view(tmp_path / "missing", "name", "x")

    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(saved_views, "replace_file", refuse)
    with pytest.raises(RunDirectoryError, match="cannot be written: Read-only file system"):
        save_view(tmp_path, "name", "x")


def test_those_who_save_at_once_lose_nothing(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    threads = [threading.Thread(target=save_view, args=(link, f"view {number}", "x")) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read_views(tmp_path)) == 16


@pytest.mark.parametrize("file", [VIEWS_FILE, ANNOTATIONS_FILE])
def test_a_folder_that_another_process_keeps_locked_is_not_waited_for_without_end(tmp_path, monkeypatch, file):
    monkeypatch.setattr("offloop.bus.files._LOCK_SECONDS", 0.1)
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        with pytest.raises(RunDirectoryError, match=f"{file} cannot be written: another process keeps the folder lock"):
            save_view(tmp_path, "mine", "q=1") if file == VIEWS_FILE else annotate(tmp_path, add=["mine"])
    finally:
        os.close(folder)
    assert list(save_view(tmp_path, "mine", "q=1")) == ["mine"]
    assert annotate(tmp_path, add=["mine"]).tags == ("mine",)

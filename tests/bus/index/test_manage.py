"""What is deleted and renamed is the run's own directory, whatever is in it and whatever it is called."""

import os
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias, Union

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offloop.bus.errors import RunDirectoryError, RunNotFoundError
from offloop.bus.index import manage
from offloop.bus.index.manage import remove_run
from offloop.bus.protocol.order import Ending
from offloop.bus.runs.directory import read_run
from offloop.bus.runs.writing import RunDirectory

Tree: TypeAlias = Mapping[bytes, Union[bytes, "Tree", None]]
"""Name to the content of a file, ``None`` for a symbolic link, or a folder."""

NAMES = (
    st.binary(min_size=1, max_size=20)
    .filter(lambda name: not {b"/", b"\0"} & {bytes([c]) for c in name})
    .filter(lambda name: name not in (b".", b"..", b"run.json", b"broker.lock", b"broker.json"))
)
TREES = st.recursive(
    st.dictionaries(NAMES, st.one_of(st.binary(max_size=5), st.none()), max_size=4),
    lambda inner: st.dictionaries(NAMES, st.one_of(st.binary(max_size=5), st.none(), inner), max_size=4),
    max_leaves=8,
)


def make_run(root: Path, name: str = "run") -> Path:
    directory = RunDirectory(root, name)
    number, recording = directory.next_attempt()
    recording.write_bytes(b"")
    directory.begin_attempt(recording, number, {}, 1)
    directory.end_attempt(Ending("finished"))
    directory.release()
    return directory.path


def write(folder: bytes, tree: Tree, targets: list[Path]) -> None:
    os.makedirs(folder, exist_ok=True)
    for number, (name, content) in enumerate(tree.items()):
        path = os.path.join(folder, name)
        if content is None:
            os.symlink(targets[number % len(targets)], path)
        elif isinstance(content, bytes):
            Path(os.fsdecode(path)).write_bytes(content)
        else:
            write(path, content, targets)


def listing(folder: Path) -> list[tuple[str, tuple[str, ...], tuple[str, ...]]]:
    return sorted((where, tuple(sorted(folders)), tuple(sorted(files))) for where, folders, files in os.walk(folder))


@settings(max_examples=40)
@given(TREES, NAMES)
def test_only_the_directory_of_the_run_is_deleted(tree: Tree, name: bytes) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        outside, root = Path(temporary, "outside"), Path(temporary, "runs")
        outside.mkdir()
        (outside / "kept").write_text("x")
        other = make_run(root, "other")
        run = make_run(root)
        write(os.fsencode(run), tree, [outside, outside / "kept", other, root, Path(".."), Path("nowhere")])
        odd = Path(os.fsdecode(os.path.join(os.fsencode(root), name)))
        if not os.path.lexists(odd):
            # A directory may have been given any name by hand.
            os.rename(run, odd)
            run = odd
        before = listing(outside), listing(other)
        remove_run(run, read_run(run).id)
        assert not os.path.lexists(run)
        assert sorted(os.listdir(root)) == ["other"]
        assert (listing(outside), listing(other)) == before


def test_a_broker_that_has_just_ended_a_run_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manage, "_PATIENCE_SECONDS", 60.0)
    path = make_run(tmp_path)
    ending = threading.Timer(0.3, RunDirectory(tmp_path, "run").release)
    ending.start()
    try:
        remove_run(path, read_run(path).id)
    finally:
        ending.join()
    assert not path.exists()


def test_a_run_of_which_something_cannot_be_deleted_is_still_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_run(tmp_path)
    (path / "kept").write_text("x")
    unlink = os.unlink

    def refuse(name: str, **options: int) -> None:
        if name == "kept":
            raise PermissionError(13, "Permission denied", name)
        unlink(name, **options)

    monkeypatch.setattr(os, "unlink", refuse)
    with pytest.raises(RunDirectoryError, match=r"run cannot be changed: Permission denied \(kept\)"):
        remove_run(path, read_run(path).id)
    assert read_run(path).status == "finished"
    monkeypatch.undo()
    remove_run(path, read_run(path).id)
    assert not path.exists()


def test_another_run_of_the_name_is_not_deleted(tmp_path: Path) -> None:
    path = make_run(tmp_path)
    with pytest.raises(RunNotFoundError, match="another one has its name"):
        remove_run(path, "0123456789abcdef")
    assert path.exists()

"""Bad input, in the short form of what ``make fuzz`` does for as long as one likes: see ``fuzz/README.md``."""

import subprocess
import sys
from pathlib import Path

import decoders
import mutation
import pytest
import target
from hypothesis import given
from hypothesis import strategies as st
from paths import ROOT
from targets import TARGETS

from bus.types.demand import MAX_INTERVAL, Demand, Want
from bus.types.event import Event

FUZZ = ROOT / "fuzz"
KEPT = [(name, path) for name in TARGETS for path in decoders.inputs(name)]


def run(script: str, *arguments: str) -> str:
    command = [sys.executable, str(FUZZ / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize(("name", "path"), KEPT, ids=[f"{name}-{path.name[:16]}" for name, path in KEPT])
def test_what_was_found_once_is_not_found_again(name: str, path: Path) -> None:
    target.run_one(TARGETS[name], path.read_bytes())


@pytest.mark.parametrize("name", [name for name in TARGETS if name != "checkpoint"])
def test_a_decoder_takes_whatever_comes(name: str) -> None:
    assert decoders.by_chance(TARGETS[name], name, seconds=1.0, seed=1) > len(TARGETS[name].seeds())


def test_checkpoints_are_fuzzed_in_a_process_of_their_own() -> None:
    # torch takes threads and memory that other tests would notice.
    assert "checkpoint: " in run("decoders.py", "checkpoint", "--seconds", "1", "--by-chance")


def test_a_decoder_that_fails_leaves_the_input_that_it_failed_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails_for_bytes_over_127(data: bytes) -> None:
        data.decode("ascii")

    monkeypatch.setattr(decoders, "CORPUS", tmp_path)
    bad = target.Target(fails_for_bytes_over_127, lambda: [b"abc"], mutation.mutate_bytes)
    with pytest.raises(UnicodeDecodeError):
        decoders.by_chance(bad, "ascii", seconds=20.0, seed=1)
    (kept,) = decoders.inputs("ascii")
    with pytest.raises(UnicodeDecodeError):
        target.run_one(bad, kept.read_bytes())


def test_a_decoder_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def turns_round(data: bytes) -> None:
        while True:
            pass

    monkeypatch.setattr(target, "INPUT_SECONDS", 0.05)
    with pytest.raises(target.OverLimitError):
        target.run_one(target.Target(turns_round, list, lambda random, data: data), b"")


@pytest.mark.timeout(120)
def test_live_sockets_take_whatever_comes() -> None:
    assert "nothing found" in run("sockets.py", "--seconds", "6", "--seed", "1")


intervals = st.integers(1, MAX_INTERVAL)
field_names = st.from_regex(r"\A[a-z_][a-z0-9_]{0,20}\Z")
wants = st.builds(Want, intervals, st.dictionaries(field_names, intervals, max_size=8))
demands = st.builds(Demand, st.dictionaries(st.sampled_from(list(Event)), wants, max_size=8))


@given(st.lists(demands, max_size=4), st.integers(0, 10_000))
def test_what_several_want_comes_out_of_the_wire_as_all_that_one_of_them_wants(parts: list[Demand], batch: int) -> None:
    merged = Demand.from_wire(Demand.merge(parts).to_wire())
    for event in Event:
        assert merged.is_due(event, batch) == any(part.is_due(event, batch) for part in parts)
        assert set(merged.due_fields(event, batch)) == {
            name for part in parts for name in part.due_fields(event, batch)
        }

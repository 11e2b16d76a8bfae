"""Bad input, in the short form of what ``make fuzz`` does for as long as one likes: see ``fuzz/README.md``."""

import subprocess
import sys
from pathlib import Path

import decoders
import pytest
from hypothesis import given
from hypothesis import strategies as st
from inputs import Target, spoiled_bytes
from paths import ROOT
from targets import TARGETS

from offloop.bus.types.demand import Demand, EventDemand
from offloop.bus.types.event import Event
from offloop.bus.types.intervals import MAX_INTERVAL

FUZZ = ROOT / "fuzz"


def run(script: str, *arguments: str) -> str:
    command = [sys.executable, str(FUZZ / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize("name", [name for name in TARGETS if name != "checkpoint"])
def test_a_decoder_takes_whatever_comes_and_what_was_found_once_is_not_found_again(name: str) -> None:
    decoders.fuzzed(name, TARGETS[name])()


def test_checkpoints_are_fuzzed_in_a_process_of_their_own() -> None:
    # torch takes threads and memory that other tests would notice.
    assert "checkpoint: nothing found" in run("decoders.py", "checkpoint", "--seconds", "1", "--by-chance")


def test_a_decoder_that_fails_leaves_the_smallest_input_that_it_failed_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails_for_bytes_over_127(data: bytes) -> None:
        data.decode("ascii")

    monkeypatch.setattr(decoders, "CORPUS", tmp_path)
    bad = Target(fails_for_bytes_over_127, lambda: [b"abc"], spoiled_bytes)
    with pytest.raises(UnicodeDecodeError):
        decoders.fuzzed("ascii", bad)()
    (kept,) = decoders.kept("ascii")
    with pytest.raises(UnicodeDecodeError):
        kept.decode("ascii")
    assert len(kept) <= 4


def test_a_decoder_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def turns_round(data: bytes) -> None:
        while True:
            pass

    monkeypatch.setattr(decoders, "INPUT_SECONDS", 0.05)
    with pytest.raises(decoders.OverLimitError):
        decoders.run_one(turns_round, b"")


@pytest.mark.timeout(120)
def test_live_sockets_take_whatever_comes() -> None:
    assert "nothing found" in run("sockets.py", "--seconds", "6", "--seed", "1")


intervals = st.integers(1, MAX_INTERVAL)
field_names = st.from_regex(r"\A[a-z_][a-z0-9_]{0,20}\Z")
requests = st.builds(EventDemand, intervals, st.dictionaries(field_names, intervals, max_size=8))
demands = st.builds(Demand, st.dictionaries(st.sampled_from(list(Event)), requests, max_size=8))


@given(st.lists(demands, max_size=4), st.integers(0, 10_000))
def test_what_several_want_comes_out_of_the_wire_as_all_that_one_of_them_wants(parts: list[Demand], batch: int) -> None:
    merged = Demand.from_wire(Demand.merge(parts).to_wire())
    for event in Event:
        assert merged.is_due(event, batch) == any(part.is_due(event, batch) for part in parts)
        assert set(merged.due_fields(event, batch)) == {
            name for part in parts for name in part.due_fields(event, batch)
        }

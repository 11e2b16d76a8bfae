"""Bad input, in the short form of what ``make fuzz`` does for as long as one likes: see ``fuzz/README.md``."""

import subprocess
import sys

import decoders
import pytest
from paths import ROOT
from targets import TARGETS

FUZZ = ROOT / "fuzz"


def run(script: str, *arguments: str) -> str:
    command = [sys.executable, str(FUZZ / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize("name", [name for name in TARGETS if name != "checkpoint"])
def test_a_decoder_takes_whatever_comes_and_what_was_found_once_is_not_found_again(name: str) -> None:
    decoders.fuzzed(name, TARGETS[name], examples=60)()


def test_checkpoints_are_fuzzed_in_a_process_of_their_own() -> None:
    # torch takes threads and memory that other tests would notice.
    assert "checkpoint: nothing found" in run("decoders.py", "checkpoint", "--seconds", "1", "--by-chance")


@pytest.mark.timeout(120)
def test_live_sockets_take_whatever_comes() -> None:
    assert "nothing found" in run("sockets.py", "--seconds", "3", "--seed", "1")

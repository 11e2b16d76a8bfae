"""The fuzzers of ``make fuzz``, for a moment each: see ``fuzz/README.md``."""

import subprocess
import sys

import decoders
import pytest
from paths import ROOT
from targets import TARGETS


def run(script: str, *arguments: str) -> str:
    command = [sys.executable, str(ROOT / "fuzz" / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize("name", [name for name in TARGETS if name != "checkpoint"])
def test_a_decoder_takes_anything_and_findings_stay_repaired(name: str) -> None:
    decoders.fuzzed(name, TARGETS[name], examples=20)()


def test_all_names_every_target() -> None:
    assert tuple(TARGETS) == decoders.NAMES


@pytest.mark.soak
@pytest.mark.timeout(120)
def test_checkpoints_and_live_sockets_take_anything() -> None:
    # In processes of their own: torch takes threads and memory that other tests would notice.
    assert "checkpoint: nothing found" in run("decoders.py", "checkpoint", "--seconds", "10", "--by-chance")
    assert "nothing found" in run("sockets.py", "--seconds", "1", "--seed", "1")

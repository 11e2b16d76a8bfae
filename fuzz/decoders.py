"""Fuzzes the decoders of messages and files.

    python fuzz/decoders.py TARGET [--seconds N] [CORPUS]      one of the targets
    python fuzz/decoders.py --all [--seconds N]                one after the other, N seconds each

Hypothesis makes the input, guided by the coverage of atheris where it is installed (``pip install --group fuzz``).
CORPUS keeps what atheris learns. Failing input is written to ``corpus/TARGET``, where the tests use it from then on.
Exit code 0 when nothing failed."""

import argparse
import contextlib
import io
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import hypothesis
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

if TYPE_CHECKING:  # nothing of ours may be imported before atheris instruments it
    from inputs import Target


CORPUS = Path(__file__).parent / "corpus"
INPUT_SECONDS = 5.0
MEMORY_BYTES = 2 << 30
NAMES = (
    *("frame", "demand", "order", "snapshot", "recording", "records"),
    *("time", "run_file", "progress", "checkpoint"),
)
# One name for a process: Hypothesis shows the smallest failing input last.
FOUND = f"crash-{time.strftime('%Y-%m-%d-%H-%M-%S')}"


def kept(name: str) -> list[bytes]:
    return [path.read_bytes() for path in sorted((CORPUS / name).glob("*"))]


class OverLimitError(BaseException):
    """An input took too long. Decoders catch only ``Exception``."""


def run_one(run: Callable[[bytes], None], data: bytes) -> None:
    signal.signal(signal.SIGPROF, _stop)
    signal.setitimer(signal.ITIMER_PROF, INPUT_SECONDS)
    try:
        run(data)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    raise OverLimitError(f"one input took more than {INPUT_SECONDS} s of processor time")


def fuzzed(name: str, target: "Target", examples: int = 300) -> Any:
    good = [*target.seeds(), *kept(name)]

    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.sampled_from(good).flatmap(target.spoiled))
    def test(data: bytes) -> None:
        try:
            run_one(target.run, data)
        except BaseException as error:
            path = CORPUS / name / FOUND
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(data)
            error.add_note(f"the input is kept as {path}")
            raise

    for data in good:
        test = example(data)(test)
    return test


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="?", choices=NAMES)
    parser.add_argument("corpus", nargs="?", type=Path, help="where atheris keeps what reaches new code")
    parser.add_argument("--all", action="store_true", help="every target")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each target (default: 60)")
    parser.add_argument("--seed", type=int, default=1, help="of the random numbers (default: 1)")
    parser.add_argument("--by-chance", action="store_true", help="not guided by coverage, though atheris is there")
    options = parser.parse_args(arguments)
    if options.all == (options.target is not None):
        parser.error("name one target, or give --all")
    if options.all:
        # Separate processes: after a finding the other targets still run.
        command = [sys.executable, __file__, "--seconds", f"{options.seconds:g}", "--seed", str(options.seed)]
        command += ["--by-chance"] if options.by_chance else []
        return max(subprocess.run([*command, name], check=False).returncode for name in NAMES)
    # Beyond it an input raises MemoryError, which a decoder must not.
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    if find_spec("atheris") and not options.by_chance:
        return _by_coverage(options.target, options.seconds, options.seed, options.corpus)
    from targets import TARGETS

    deadline, test = time.monotonic() + options.seconds, fuzzed(options.target, TARGETS[options.target])
    while time.monotonic() < deadline:
        hypothesis.seed(options.seed)(test)()
        options.seed += 1
    print(f"{options.target}: nothing found in {options.seconds:g} s")
    return 0


def _by_coverage(name: str, seconds: float, seed: int, corpus: Path | None) -> int:
    import atheris

    # atheris prints the name of every module.
    with contextlib.redirect_stderr(io.StringIO()), atheris.instrument_imports(include=["offloop"]):
        from targets import TARGETS
    flags = [f"-max_total_time={max(1, round(seconds))}", f"-seed={seed}", "-max_len=8192", "-rss_limit_mb=0"]
    flags += ["-verbosity=0", "-print_final_stats=1", f"-timeout={round(4 * INPUT_SECONDS)}"]
    # A long first input: Hypothesis cannot use a short one.
    flags.append(f"-seed_inputs={__file__}")
    if corpus:
        corpus.mkdir(parents=True, exist_ok=True)
        flags.append(str(corpus))
    take = fuzzed(name, TARGETS[name]).hypothesis.fuzz_one_input
    # atheris exits the process at once, which would leave the targets' files behind.
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    atheris.Setup([name, *flags, "-exact_artifact_path=/dev/null"], take)
    print(f"{name}:", flush=True)
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())

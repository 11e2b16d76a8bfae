"""Fuzzes the decoders: bytes that a wire or a disk may give, until one does what it must not.

    python fuzz/decoders.py TARGET [--seconds N] [CORPUS]      one of the targets
    python fuzz/decoders.py --all [--seconds N]                one after the other, N seconds each

Guided by coverage where atheris is installed (``pip install --group fuzz``), else by chance alone. It begins with what
is in ``corpus/TARGET``; new input that reaches new code is kept in CORPUS, if that is given. Input that fails is
written to ``corpus/TARGET``, where the tests find it from then on. Exit code 0 when nothing failed.
"""

import argparse
import contextlib
import hashlib
import io
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from random import Random

from target import INPUT_SECONDS, Target, run_one

CORPUS = Path(__file__).parent / "corpus"
MEMORY_BYTES = 2 << 30
MAX_INPUT = 64 * 1024
NAMES = (
    *("frame", "demand", "order", "snapshot", "recording", "records"),
    *("time", "run_file", "keys", "progress", "checkpoint"),
)


def inputs(name: str) -> list[Path]:
    """The input of a target that is kept in the repository."""
    return sorted((CORPUS / name).glob("*"))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="?", choices=NAMES)
    parser.add_argument("corpus", nargs="?", type=Path, help="where input that reaches new code is kept")
    parser.add_argument("--all", action="store_true", help="every target")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each target (default: 60)")
    parser.add_argument("--seed", type=int, default=1, help="of the random numbers (default: 1)")
    parser.add_argument("--by-chance", action="store_true", help="not guided by coverage, though atheris is there")
    options = parser.parse_args(arguments)
    if options.all == (options.target is not None):
        parser.error("name one target, or give --all")
    if options.all:
        # A process for each: after a finding the others still have their turn.
        command = [sys.executable, __file__, "--seconds", f"{options.seconds:g}", "--seed", str(options.seed)]
        command += ["--by-chance"] if options.by_chance else []
        return max(subprocess.run([*command, name], check=False).returncode for name in NAMES)
    # Beyond it an input raises MemoryError, which no decoder may.
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    if find_spec("atheris") and not options.by_chance:
        return _by_coverage(options.target, options.seconds, options.seed, options.corpus)
    from targets import TARGETS

    count = by_chance(TARGETS[options.target], options.target, options.seconds, options.seed)
    print(f"{options.target}: {count} inputs, nothing found")
    return 0


def _by_coverage(name: str, seconds: float, seed: int, corpus: Path | None) -> int:
    import atheris

    # It names every module.
    quiet = contextlib.redirect_stderr(io.StringIO())
    with quiet, atheris.instrument_imports(include=["bus", "consumers", "trainer"]):
        from targets import TARGETS
    target = TARGETS[name]
    (CORPUS / name).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="offloop-fuzz-") as scratch:
        seeds = Path(scratch) / "seeds"
        seeds.mkdir()
        for number, data in enumerate(target.seeds()):
            (seeds / str(number)).write_bytes(data)
        found = corpus or Path(scratch) / "found"
        found.mkdir(parents=True, exist_ok=True)

        def mutate(data: bytes, max_size: int, number: int) -> bytes:
            random = Random(number)
            if random.random() < 0.5:
                return bytes(atheris.Mutate(data, max_size))
            return target.mutate(random, data)[:max_size]

        flags = [f"-max_total_time={max(1, round(seconds))}", f"-seed={seed}", f"-max_len={MAX_INPUT}"]
        flags += [f"-artifact_prefix={CORPUS / name}/", f"-timeout={round(4 * INPUT_SECONDS)}", "-print_final_stats=1"]
        flags += ["-rss_limit_mb=0", "-verbosity=0"]
        folders = [str(found), str(seeds), str(CORPUS / name)]
        atheris.Setup([name, *flags, *folders], lambda data: run_one(target, data), custom_mutator=mutate)
        print(f"{name}:", flush=True)
        # It ends the process by itself.
        atheris.Fuzz()
    return 0


def by_chance(target: Target, name: str, seconds: float, seed: int) -> int:
    """Gives a target its own good input, what is kept in the repository under ``name``, and then, for so many seconds,
    changes of both. Returns how many inputs that were.

    Raises whatever the target does; the input is in the corpus then."""
    random = Random(seed)
    known = [*target.seeds(), *(path.read_bytes() for path in inputs(name))]
    deadline, count = time.monotonic() + seconds, 0
    while count <= len(known) or time.monotonic() < deadline:
        data = known[count] if count < len(known) else random.choice(known)
        for _ in range(0 if count < len(known) else random.randint(1, 3)):
            data = target.mutate(random, data)[:MAX_INPUT]
        try:
            run_one(target, data)
        except BaseException:
            path = CORPUS / name / f"crash-{hashlib.sha1(data).hexdigest()}"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(data)
            print(f"{name}: after {count} inputs one fails, which is kept as {path}", file=sys.stderr)
            raise
        count += 1
    return count


if __name__ == "__main__":
    sys.exit(main())

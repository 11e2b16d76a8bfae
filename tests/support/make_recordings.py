"""Makes the recordings of this version, ``tests/data/recordings/VERSION``: run it once for each release.

    python tests/support/make_recordings.py
    pytest tests/bus/recording/test_old_recordings.py --offloop-update-golden

It trains the tasks below in processes of their own. They are told a made-up machine, so that a recording says nothing
about the one on which it was made.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from helpers import wait_for
from paths import DATA

from offloop.bus import Event, Recording, Snapshot, Subscriber
from offloop.bus.runs.directory import read_run
from offloop.bus.types.timestamp import Timestamp
from offloop.consumers import ActivationMonitor, Callback, Logger, MemoryMonitor, NaNMonitor, OptimizerMonitor, Runner
from offloop.consumers.runner.entries import Subscription

RECORDINGS = DATA / "recordings"
FACTS = "facts.json"

MACHINE = {"host": "trainer", "operating_system": "Linux", "cpu": "CPU", "cpu_cores": 2, "cpu_threads": 2}
MACHINE |= {"memory_bytes": 8 << 30, "nodes": 1, "accelerators": 0}

JUDGE = "judge"


# -- tasks, for the command trainer -----------------------------------------------------------------------------------


def digits(batch_size: int = 32) -> dict[str, Any]:
    """Handwritten digits, on the made-up machine."""
    import torch

    from offloop.bus.publisher import description as link
    from offloop.trainer.stream import publishing
    from offloop.trainer.tasks.digits import digits as task

    facts = {**MACHINE, "python": sys.version.partition(" ")[0], "torch": torch.__version__.partition("+")[0]}
    facts["offloop"] = version("offloop")
    publishing.describe_system = lambda _: facts
    link.describe_process = lambda: {"command": ["trainer", "digits"], "host": facts["host"], "pid": 1}
    return task(batch_size=batch_size)


def failing() -> dict[str, Any]:
    """As ``digits``, with an error after the seventh batch."""
    from offloop.trainer import Algorithm, State

    class Fails(Algorithm):
        def match(self, event: Event, state: State) -> bool:
            return event is Event.BATCH_END and int(state.timestamp.batch) == 7

        def apply(self, event: Event, state: State, logger: Any) -> None:
            raise ValueError("the seventh batch is one too many")

    return {**digits(), "algorithms": [Fails()]}


def slow() -> dict[str, Any]:
    """As ``digits``, slow enough for several chunks."""
    from offloop.trainer import Algorithm, State

    class Sleeps(Algorithm):
        def match(self, event: Event, state: State) -> bool:
            return event is Event.BATCH_END

        def apply(self, event: Event, state: State, logger: Any) -> None:
            time.sleep(0.05)

    return {**digits(), "algorithms": [Sleeps()]}


# -- callbacks that ask and command -----------------------------------------------------------------------------------


class Phases(Callback):
    """Asks for the phases of every second batch."""

    fields = ("phases",)
    every = 2
    all_ranks = True

    def batch_end(self, state: Snapshot, logger: Logger) -> None:
        """Needs them in the recording, and nothing else. The training waits after its first batch until all that is
        asked for has come to it."""
        if state.timestamp.batch == 1 and state.rank == 0:
            time.sleep(1)


class Norms(Callback):
    """Asks for what else can be had on a CPU, in every fourth batch."""

    fields = ("gradient_norms", "parameter_norm", "parameter_norms", "moment_norms", "update_norms", "model_summary")
    every = 4

    def batch_end(self, state: Snapshot, logger: Logger) -> None:
        """As above."""


class Commands(Callback):
    """Sets the learning rate after the fourth batch, and stops after the tenth; a command that is refused comes
    between."""

    barrier_events = (Event.BATCH_END,)

    def batch_end(self, state: Snapshot, logger: Logger) -> None:
        """Sends what is due."""
        match int(state.timestamp.batch):
            case 4:
                state.send_command("set", "lr", 0.001)
            case 6:
                state.send_command("set", "no-such-setting", 1)
            case 10:
                state.stop_training()


# -- recordings -------------------------------------------------------------------------------------------------------


def train(
    folder: Path, task: str = "digits", *callbacks: Callback, ranks: int = 1, status: int = 0, **options: Any
) -> Path:
    """Trains a few batches, observed by the callbacks, and returns the recording."""
    chosen = {"seed": 1, "device": "cpu", "train_batches": 12, "run_name": task, **options}
    if callbacks:
        chosen["wait_for"] = JUDGE
    # The name of the task is a hyperparameter: a path of this machine does not belong in a recording.
    (folder / "tasks.py").write_text("from make_recordings import digits, failing, slow\n")
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    flags = [f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}") for name, value in chosen.items()]
    command = [sys.executable, *launcher, "-m", "offloop.trainer", f"tasks.py:{task}", "--runs-dir", "runs", *flags]
    path = folder / "runs" / str(chosen["run_name"])
    with subprocess.Popen([*command, "--no-progress"], cwd=folder) as process:
        if callbacks:
            wait_for(lambda: (path / "run.json").exists() and read_run(path).live, "the run", 120)
            asked = vars(Subscription.of(callbacks, JUDGE))
            # A training with wait_for waits for consumers that may decide something.
            asked |= {name: asked[name] | {Event.BATCH_END} for name in ("events", "barrier_events")}
            with Subscriber(path, **asked) as stream:
                Runner(stream, callbacks).run()
        assert process.wait(300) == status
    return Recording(path).path


def evaluated(folder: Path, task: str = "digits") -> Path:
    """Two epochs, with an evaluation after each."""
    return train(folder, task, max_duration="2ep", run_name="evaluated")


def ranks(folder: Path) -> Path:
    """Two ranks, with the phases of their batches."""
    return train(folder, "digits", Phases(), ranks=2, max_duration="1ep", run_name="ranks")


def resumed(folder: Path) -> Path:
    """The second attempt of a run: it goes on after the first epoch."""
    options = {"run_name": "resumed", "save_folder": folder / "checkpoints", "autoresume": True}
    train(folder, max_duration="1ep", **options)
    return train(folder, max_duration="2ep", **options)


def stopped(folder: Path) -> Path:
    """Commanded: another learning rate, a setting that there is not, and a stop."""
    return train(folder, "digits", Commands(), max_duration="3ep", run_name="stopped")


def fields(folder: Path) -> Path:
    """Every event, also of microbatches, and fields on demand: norms, activations, phases, memory."""
    asking = [
        OptimizerMonitor(batch_log_interval=4),
        OptimizerMonitor(batch_log_interval=3, only_global=True),
        NaNMonitor(),
        ActivationMonitor(interval=4),
        MemoryMonitor(),
        Norms(),
        Phases(),
    ]
    options = {"microbatch_size": 16, "record": "all", "train_batches": 8, "max_duration": "1ep"}
    return train(folder, "digits", *asking, run_name="fields", **options)


def failed(folder: Path) -> Path:
    """Ended by an error in the training."""
    return train(folder, "failing", max_duration="1ep", run_name="failed", status=1)


def cut(folder: Path) -> Path:
    """Cut off in the middle, as a machine that lost its power leaves it."""
    whole = evaluated(folder, "slow")
    path = whole.with_name("cut.mcap")
    path.write_bytes(whole.read_bytes()[: whole.stat().st_size * 6 // 10])
    return path


MADE: list[Callable[[Path], Path]] = [evaluated, ranks, resumed, stopped, fields, failed, cut]


def facts_of(path: Path) -> dict[str, Any]:
    """What every version is to find in a recording."""
    recording = Recording(path)
    counts: dict[int, Counter[str]] = {}
    on_demand: Counter[str] = Counter()
    for snapshot in recording:
        on_demand.update(snapshot.on_demand)
        counts.setdefault(snapshot.rank, Counter())[snapshot.event.value] += 1
        last: Timestamp = snapshot.timestamp
    return {
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "run": recording.run_name,
        "attempt": recording.attempt,
        "ending": [recording.ending.status, recording.ending.error] if recording.ending else None,
        "damaged": recording.damage is not None,
        "gaps": [list(gap) for gap in recording.gaps],
        "commands": [
            [str(outcome.command), outcome.event, outcome.batch, outcome.error] for outcome in recording.read_commands()
        ],
        "events": {str(rank): dict(sorted(counts[rank].items())) for rank in sorted(counts)},
        "on_demand": dict(sorted(on_demand.items())),
        "last": list(last.values),
    }


def main() -> None:
    """Makes them all, and writes down what is in them."""
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)
    folder = RECORDINGS / version("offloop")
    if folder.exists():
        sys.exit(f"{folder} exists: the recordings of a version are made once, and never changed")
    made = Path(tempfile.mkdtemp(prefix="ol-"))
    facts = {}
    for make in MADE:
        (made / "work").mkdir()
        path = made / f"{make.__name__}.mcap"
        shutil.copyfile(make(made / "work"), path)
        shutil.rmtree(made / "work")
        facts[make.__name__] = facts_of(path)
        told = facts[make.__name__]
        print(f"{path.name}: {path.stat().st_size:,} bytes, {told['ending'][0]}, {', '.join(told['on_demand'])}")
    (made / FACTS).write_text(json.dumps(facts, indent=1) + "\n")
    folder.mkdir(parents=True)
    shutil.copytree(made, folder, dirs_exist_ok=True, copy_function=shutil.copyfile)
    folder.chmod(0o755)
    shutil.rmtree(made)


if __name__ == "__main__":
    main()

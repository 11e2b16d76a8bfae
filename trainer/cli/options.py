"""The options that the command ``trainer`` has for every task, and the trainer's arguments that they stand for.

An option that is not given is ``None``: then what the task says counts, and after that the trainer's default.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from bus.errors import ConfigurationError, OffloopError
from bus.types.time import Time
from trainer.arguments.durations import check_interval, check_iteration_length, check_max_duration


def _read_by(read: Callable[[str], Any]) -> Callable[[click.Context, click.Parameter, str | None], Any]:
    """Reads an option's text; what ``read`` refuses is said with the option's name, before anything starts."""

    def convert(context: click.Context, parameter: click.Parameter, text: str | None) -> Any:
        try:
            return None if text is None else read(text)
        except OffloopError as error:
            raise click.BadParameter(str(error), context, parameter) from None

    return convert


def _interval(text: str) -> Time | int:
    return 0 if text.strip() == "0" else check_interval(text)


def _max_duration(text: str) -> Time:
    duration = check_max_duration(text)
    if duration.value == 0:
        raise ConfigurationError(f"{text} is over at once: use 1ep or more")
    return duration


def _microbatch_size(text: str) -> int | str:
    if text == "auto":
        return text
    if not text.isdecimal() or int(text) == 0:
        raise ConfigurationError(f"{text!r} is no number of samples: use 1 or more, or 'auto'")
    return int(text)


def _names(_context: click.Context, _parameter: click.Parameter, values: tuple[str, ...]) -> list[str] | None:
    return [name.strip() for value in values for name in value.split(",") if name.strip()] or None


def _texts(_context: click.Context, _parameter: click.Parameter, values: tuple[str, ...]) -> list[str] | None:
    return list(values) or None


_BATCHES = click.IntRange(min=1)

COMMON_OPTIONS: dict[str, list[click.Option]] = {
    "Training": [
        click.Option(
            ["--max-duration", "-d"],
            metavar="TIME",
            callback=_read_by(_max_duration),
            help="How long to train: 5ep, 1000ba, 10000sp, 1h30m. Default: the task's own.",
        ),
        click.Option(
            ["--eval-interval"],
            metavar="TIME",
            callback=_read_by(_interval),
            help="How often to evaluate: 1ep, 100ba, 0.25dur; 0 for never. Default: the task's own, else 1ep.",
        ),
        click.Option(
            ["--algorithms"],
            metavar="NAME[,NAME...]",
            multiple=True,
            callback=_names,
            help="Algorithms to train with; 'trainer --list-algorithms' shows them. Others as package.module:Class or "
            "file.py:Class.",
        ),
        click.Option(
            ["-o", "algorithm_options"],
            metavar="NAME.OPTION=VALUE",
            multiple=True,
            callback=_texts,
            help="Sets an option of an algorithm, such as EMA.half_life=10ba.",
        ),
        click.Option(
            ["--precision"],
            type=click.Choice(["fp32", "amp_bf16", "amp_fp16"]),
            help="Numbers to compute in where 16 bits are good enough. Default: fp32.",
        ),
        click.Option(
            ["--microbatch-size"],
            metavar="N|auto",
            callback=_read_by(_microbatch_size),
            help="Splits batches into parts of so many samples, whose gradients are added up; 'auto' finds the size "
            "that fits into the memory. Default: whole batches.",
        ),
        click.Option(["--train-batches"], type=_BATCHES, metavar="N", help="Batches in an epoch. Default: all."),
        click.Option(["--eval-batches"], type=_BATCHES, metavar="N", help="Batches in an evaluation. Default: all."),
        click.Option(
            ["--iteration-length"],
            metavar="TIME",
            callback=_read_by(check_iteration_length),
            help="Epochs or tokens in an iteration, for durations and intervals such as 3iter: 2ep, 1000000tok.",
        ),
        click.Option(["--compile"], is_flag=True, default=None, help="Compile the model with torch.compile."),
        click.Option(
            ["--deterministic"], is_flag=True, default=None, help="Let torch compute deterministically, or fail."
        ),
        click.Option(
            ["--seed"],
            type=click.IntRange(0, 2**32 - 1),
            help="For all random numbers. Default: a new one, with --autoresume one that follows from the run's name.",
        ),
        click.Option(["--device"], type=click.Choice(["auto", "cpu", "gpu"]), help="Default: auto."),
    ],
    "Checkpoints": [
        click.Option(["--save-folder"], metavar="DIR", help="Where to write checkpoints. Default: none are written."),
        click.Option(
            ["--save-interval"],
            metavar="TIME",
            callback=_read_by(_interval),
            help="How often to write one, besides at the end: 1ep, 100ba. Default: 1ep.",
        ),
        click.Option(["--keep"], type=_BATCHES, metavar="N", help="How many of them to keep. Default: all."),
        click.Option(
            ["--save-overwrite"],
            is_flag=True,
            default=None,
            help="Write over checkpoints that are in the folder already.",
        ),
        click.Option(
            ["--autoresume"],
            is_flag=True,
            default=None,
            help="Go on from the latest checkpoint in the folder, if there is one. Needs --run-name.",
        ),
        click.Option(
            ["--load-path"],
            type=click.Path(exists=True, path_type=Path),
            metavar="PATH",
            help="A checkpoint to go on from, or a folder of them, of which the latest is taken.",
        ),
        click.Option(
            ["--load-weights-only"], is_flag=True, default=None, help="Take the model's weights from it, nothing else."
        ),
        click.Option(
            ["--load-what-fits"],
            is_flag=True,
            default=None,
            help="Take its weights even if it lacks some of the model's, or has others.",
        ),
    ],
    "Run and stream": [
        click.Option(["--run-name"], metavar="NAME", help="Default: the task's name and the time."),
        click.Option(
            ["--runs-dir"],
            type=click.Path(path_type=Path),
            metavar="DIR",
            help="Where runs live. Default: $OFFLOOP_RUNS_DIR, else 'runs' in the current folder.",
        ),
        click.Option(
            ["--publish/--no-publish"],
            default=None,
            help="Whether there is a stream to watch and record. Default: there is.",
        ),
        click.Option(
            ["--broker"],
            metavar="ADDRESS",
            help="A broker that runs already, such as tcp://127.0.0.1:5570. Default: own.",
        ),
        click.Option(["--key"], metavar="FILE", help="Your secret key for that broker. Default: $OFFLOOP_KEY."),
        click.Option(["--broker-key"], metavar="FILE", help="That broker's public key. Default: $OFFLOOP_BROKER_KEY."),
        click.Option(
            ["--backlog-bytes"],
            type=int,
            metavar="N",
            help="Bound of the memory for events that are not on disk yet. Default: 64 MiB.",
        ),
        click.Option(
            ["--record"], metavar="EVENTS", help="Events to record beside the base set, such as batch_start, or 'all'."
        ),
        click.Option(
            ["--strict-stops"],
            is_flag=True,
            default=None,
            help="Wait where a consumer may decide to stop the training until it has: it stops exactly there. Default: "
            "the training never waits, and stops a few batches later.",
        ),
        click.Option(
            ["--wait-for"],
            metavar="NAME[,NAME...]",
            multiple=True,
            callback=_names,
            help="As --strict-stops, for consumers of these names (their --name), and waits for them to attach.",
        ),
        click.Option(
            ["--wait-seconds"],
            type=click.FloatRange(min=0, min_open=True),
            metavar="S",
            help="How long it waits for a consumer at a time. Default: 30.",
        ),
        click.Option(
            ["--commands-from"],
            type=click.Path(exists=True, path_type=Path),
            metavar="PATH",
            help="A recording, or a run's folder: the commands that its training took are applied again.",
        ),
        click.Option(
            ["--progress/--no-progress"],
            default=None,
            help="Whether to show progress on standard error. Default: it is shown.",
        ),
    ],
}
"""The options by the heading under which the help shows them."""

OPTION_NAMES = frozenset(str(option.name) for options in COMMON_OPTIONS.values() for option in options)

_OTHER_NAMES = {
    "deterministic": "deterministic_mode",
    "eval_batches": "eval_subset_num_batches",
    "keep": "save_num_checkpoints_to_keep",
    "microbatch_size": "device_train_microbatch_size",
    "progress": "progress_bar",
    "train_batches": "train_subset_num_batches",
}
_NEEDS = (
    ("save_interval", "save_folder"),
    ("keep", "save_folder"),
    ("save_overwrite", "save_folder"),
    ("autoresume", "save_folder"),
    ("autoresume", "run_name"),
    ("load_weights_only", "load_path"),
    ("load_what_fits", "load_path"),
)


def trainer_arguments(values: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments for :class:`trainer.Trainer` that stand for the values given by option, by the options' names.

    Algorithms are left out: they have yet to be made."""
    given = {name: values[name] for name in OPTION_NAMES if values[name] is not None}
    for name in ("algorithms", "algorithm_options"):
        given.pop(name, None)
    if given.pop("compile", False):
        given["compile_config"] = {}
    if given.pop("load_what_fits", False):
        given["load_strict_model_weights"] = False
    if given.pop("strict_stops", False):
        given["wait_for"] = ["all", *given.get("wait_for", [])]
    return {_OTHER_NAMES.get(name, name): value for name, value in given.items()}


def check_together(values: Mapping[str, Any], arguments: Mapping[str, Any]) -> None:
    """Raises :class:`bus.errors.ConfigurationError` for an option given that has no effect, or no meaning, without an
    argument that neither the command line nor the task gives."""
    for name, needed in _NEEDS:
        if values[name] is not None and arguments.get(needed) is None:
            raise ConfigurationError(f"{_dashed(name)} needs {_dashed(needed)}: add it, or leave {_dashed(name)} out")


def _dashed(name: str) -> str:
    return f"--{name.replace('_', '-')}"

"""The command ``trainer``. It starts without torch, to be able to say that torch is missing."""

import contextlib
import inspect
import re
import shlex
import signal
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import click

from bus.errors import ConfigurationError
from bus.runs import new_run_name
from bus.terminal import run_command
from trainer import missing_extra
from trainer.durations import check_interval, check_max_duration
from trainer.tasks import BUILT_IN, Task, TaskOption, find_task

__all__ = ["main", "trainer"]


class _Tasks(click.Group):
    """A command for each task; which options it has is known once the task's function is imported."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(BUILT_IN)

    def get_command(self, ctx: click.Context, name: str) -> click.Command:
        return _task_command(find_task(name))

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Tasks"):
            formatter.write_dl([*((name, text) for name, (_, text) in sorted(BUILT_IN.items())), _OWN_TASK])


_OWN_TASK = (
    "module:function",
    "Your own function that returns arguments for Trainer; also path/to/file.py:function.",
)


@click.group(
    cls=_Tasks,
    invoke_without_command=True,
    subcommand_metavar="TASK [OPTIONS]",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.option("--list", "show_list", is_flag=True, help="Show the tasks, and exit.")
@click.version_option(package_name="offloop", prog_name="trainer")
@click.pass_context
def trainer(ctx: click.Context, show_list: bool) -> None:
    """Train a model and publish what happens, for consumers to watch.

    'trainer TASK --help' shows what a task does and its options.
    """
    if show_list:
        width = max(len(name) for name in BUILT_IN)
        for name, (_, text) in sorted(BUILT_IN.items()):
            click.echo(f"{name:<{width}}  {text}")
        click.echo("\n'trainer TASK --help' shows a task's options; your own is named module:function")
        ctx.exit()
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def main() -> None:
    """Entry point."""
    run_command(trainer)


# Bad values are reported while the command line is read, before anything starts.
def _interval(_context: click.Context, _parameter: click.Parameter, value: str | None) -> Any:
    return None if value is None else check_interval(0 if value.strip() == "0" else value)


def _duration(_context: click.Context, _parameter: click.Parameter, value: str | None) -> Any:
    if value is None:
        return None
    duration = check_max_duration(value)
    if duration.value == 0:
        raise ConfigurationError(f"--max-duration {value} is over at once: use 1ep or more")
    return duration


_COMMON = [
    click.Option(
        ["--max-duration", "-d"],
        metavar="TIME",
        callback=_duration,
        help="How long to train: 5ep, 1000ba, 10000sp, 1h30m. Default: the task's own.",
    ),
    click.Option(
        ["--eval-interval"],
        metavar="TIME",
        callback=_interval,
        help="How often to evaluate: 1ep, 100ba, 0.25dur; 0 for never. Default: the task's own, else 1ep.",
    ),
    click.Option(["--run-name"], metavar="NAME", help="Default: the task's name and the time."),
    click.Option(
        ["--runs-dir"],
        type=click.Path(path_type=Path),
        metavar="DIR",
        help="Where runs live. Default: $OFFLOOP_RUNS_DIR, else 'runs' in the current folder.",
    ),
    click.Option(["--seed"], type=click.IntRange(0, 2**32 - 1), help="For all random numbers. Default: a new one."),
    click.Option(["--device"], type=click.Choice(["auto", "cpu", "gpu"]), default="auto", show_default=True),
    click.Option(["--publish/--no-publish"], default=True, help="Whether there is a stream to watch and record."),
    click.Option(
        ["--broker"], metavar="ADDRESS", help="A broker that runs already, such as tcp://127.0.0.1:5570. Default: own."
    ),
    click.Option(
        ["--record"], metavar="EVENTS", help="Events to record beside the base set, such as batch_start, or 'all'."
    ),
    click.Option(["--progress/--no-progress"], default=True, help="Whether to show progress on standard error."),
]
_COMMON_NAMES = {str(option.name) for option in _COMMON}


def _task_command(task: Task) -> click.Command:
    def run(**values: Any) -> None:
        run_task(task, values)

    own = [_click_option(option) for option in task.options if option.name not in _COMMON_NAMES]
    return click.Command(task.name, params=[*own, *_COMMON], callback=run, help=task.help, short_help=task.help)


def _click_option(option: TaskOption) -> click.Option:
    dashed = option.name.replace("_", "-")
    declaration = f"--{dashed}/--no-{dashed}" if option.kind is bool else f"--{dashed}"
    # A default of None would count as given, and the option as not required any more.
    default = {"required": True} if option.required else {"default": option.default, "show_default": True}
    return click.Option([declaration, option.name], type=option.kind, help=option.help or None, **default)


def run_task(task: Task, values: Mapping[str, Any]) -> None:
    """Trains a task with the values of its own and of the common options by name.

    Raises :class:`bus.errors.ConfigurationError` when the task or one of its values will not do."""
    try:
        from trainer.device import is_gpu
        from trainer.ranks import join_ranks
        from trainer.seeding import new_seed, seed_all
        from trainer.trainer import Trainer
    except ModuleNotFoundError as error:
        raise ConfigurationError(missing_extra(error.name or "torch")) from None
    given = {**values, "seed": new_seed() if values["seed"] is None else values["seed"]}
    ranks = join_ranks(on_gpu=is_gpu(given["device"]))
    if ranks is not None:
        given["seed"] = ranks.share(given["seed"])
    seed_all(given["seed"])
    options = {option.name: given[option.name] for option in task.options if given[option.name] is not None}
    arguments = {**task.arguments(**options), **_settings(task, options, given)}
    _check_arguments(task, arguments, inspect.signature(Trainer).parameters)
    recording = None
    # One rank speaks for all of them.
    say = click.echo if ranks is None or ranks.rank == 0 else _say_nothing
    try:
        with _terminated_like_interrupted(), Trainer(**arguments) as made:
            recording = None if made.recording is None else _short(made.recording)
            say(f"run {made.run_name}: {_where_to_watch(recording, given['runs_dir'])}")
            made.fit()
    finally:
        if recording:
            say(f"recording: {recording}{_what_is_missing(made)}")


def _say_nothing(_line: str) -> None:
    """For the ranks that do not speak."""


def _what_is_missing(trainer: Any) -> str:
    return "" if trainer.recorded_all else ", INCOMPLETE: not all that was published could be recorded"


@contextlib.contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """SIGTERM ends the training as Ctrl-C does: stopped, with a whole record, and every consumer told."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _settings(task: Task, options: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    settings = {name: given[name] for name in ("runs_dir", "device", "publish", "broker", "record", "seed")}
    for name in ("max_duration", "eval_interval"):
        if given[name] is not None:
            settings[name] = given[name]
    prefix = re.sub(r"[^A-Za-z0-9._-]", "-", task.name.rpartition(":")[2]).lstrip("._-") or "run"
    settings["run_name"] = given["run_name"] or new_run_name(prefix, given["runs_dir"])
    settings["progress_bar"] = given["progress"]
    settings["config"] = {"task": task.name, **options}
    return settings


def _check_arguments(task: Task, arguments: Mapping[str, Any], allowed: Mapping[str, Any]) -> None:
    for name in arguments:
        if name not in allowed:
            close = get_close_matches(name, allowed, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"it takes {', '.join(allowed)}"
            raise ConfigurationError(f"task {task.name!r} returned {name!r}, which Trainer does not take: {hint}")
    if "model" not in arguments:
        raise ConfigurationError(f"task {task.name!r} returned no model: return a dict of arguments for Trainer")
    if arguments.get("max_duration") is None:
        raise ConfigurationError(
            f"task {task.name!r} does not say how long to train: add --max-duration 5ep or the like"
        )


def _where_to_watch(recording: str | None, runs_dir: Path | None) -> str:
    if recording is None:
        return "no stream, so there is nothing to watch or record"
    where = f" --runs-dir {shlex.quote(str(runs_dir))}" if runs_dir else ""
    return f"recording to {recording}; watch it with: consumer --callbacks speed,lr{where}"


def _short(path: Path) -> str:
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)

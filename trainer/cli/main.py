"""The command ``offloop train``, or ``trainer``. It starts without torch, to report that torch is missing."""

import contextlib
import inspect
import itertools
import os
import re
import shlex
import signal
import sys
import textwrap
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from offloop.bus import printing
from offloop.bus.errors import CheckpointError, ConfigurationError, InvalidRunNameError, InvalidTimeError, OffloopError
from offloop.bus.terminal import HELP, CliCommand, handle_signals, run_command, write_options
from offloop.trainer.arguments import missing_extra
from offloop.trainer.cli.options import COMMON_OPTIONS, OPTION_NAMES, check_together, trainer_arguments
from offloop.trainer.distributed.launcher import report_failure
from offloop.trainer.tasks import BUILT_IN, Task, find_task

if TYPE_CHECKING:
    from offloop.trainer.distributed.ranks import Ranks
    from offloop.trainer.trainer import Trainer


_MISTAKES = (ConfigurationError, InvalidTimeError, InvalidRunNameError, CheckpointError)
_FREQUENT = ("--max-duration", "--run-name", "--seed", "--device", "--save-folder", "--autoresume")
"""The common options that the help of a task explains."""


class _Mistake(click.ClickException):
    exit_code = 2


@contextlib.contextmanager
def _refusing(kind: type[OffloopError] = OffloopError) -> Iterator[None]:
    """Exit with one line for an error: code 2 for a mistake in the arguments, otherwise 1."""
    try:
        yield
    except kind as error:
        raise (_Mistake if isinstance(error, _MISTAKES) else click.ClickException)(str(error)) from error


class _Start:
    """The start of a training, before its run begins."""

    finished = False

    def loading(self) -> contextlib.AbstractContextManager[None]:
        """Exit at once on Ctrl-C and SIGTERM: an exception would leave torch and numpy half loaded."""

        def leave(*_: object) -> None:
            _say_interrupted()
            os._exit(130)

        return handle_signals(leave, signal.SIGINT, signal.SIGTERM)


class _Tasks(click.Group):
    """A command for each task. Its options are known once the task's function is imported."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        with _reporting_failure():
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        ctx.obj = start = _Start()
        with _reporting_failure(), handle_signals(_interrupt, signal.SIGTERM):
            try:
                return super().invoke(ctx)
            except KeyboardInterrupt:
                if start.finished:
                    if _is_first_rank():
                        raise
                    sys.exit(130)
                _say_interrupted()
                sys.exit(130)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        # As early as this: the module of a user's task imports torch.
        with ctx.obj.loading():
            return super().resolve_command(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(BUILT_IN)

    def get_command(self, ctx: click.Context, name: str) -> click.Command:
        with _refusing():
            return _task_command(find_task(name))

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Tasks"):
            own = "Your own function that returns arguments for Trainer; also path/to/file.py:function."
            built_in = [(name, find_task(name).help.partition("\n")[0]) for name in self.list_commands(ctx)]
            formatter.write_dl([*built_in, ("module:function", own)])


@contextlib.contextmanager
def _reporting_failure() -> Iterator[None]:
    try:
        yield
    except click.ClickException as error:
        if not _is_first_rank():
            _wait_for_the_first_rank()
        report_failure(f"error: {error.format_message()}")
        raise
    except (OffloopError, OSError) as error:
        report_failure(f"error: {error}")
        raise


def _interrupt(*_: object) -> None:
    # SIGTERM ends the training as Ctrl-C does: stopped, with a complete recording, and reported to every consumer.
    raise KeyboardInterrupt("signal SIGTERM")


def _say_interrupted() -> None:
    if _is_first_rank():
        printing.say("interrupted before the training began", err=True)


def _is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _wait_for_the_first_rank() -> None:
    # torchrun ends all ranks when one has ended, and the first rank reports the same error. If this returns, only
    # this rank has something to report.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(10)


class _TaskCommand(CliCommand):
    """Lists only the names of the options that all tasks have, except the frequent ones."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        first, others = self.split_options(ctx)
        write_options({"Options": first}, ctx, formatter)
        width = formatter.width - max(map(len, COMMON_OPTIONS)) - 6
        with formatter.section("More options ('trainer --list-options' explains them)"):
            for heading, options in COMMON_OPTIONS.items():
                shown = [option for option in options if option in others]
                names = ", ".join("/".join((option.opts[-1], *option.secondary_opts)) for option in shown)
                # Wrapped here, as click breaks lines within names of options.
                lines = textwrap.fill(names, width, break_on_hyphens=False)
                formatter.write_dl([(heading.ljust(max(map(len, COMMON_OPTIONS))), f"\b\n{lines}")])


@click.group(
    cls=_Tasks,
    invoke_without_command=True,
    short_help="Train a task, such as digits, as a run.",
    subcommand_metavar="TASK [OPTIONS]",
    context_settings=HELP,
)
@click.option("--list-options", is_flag=True, help="Show the options that all tasks have, and exit.")
@click.option("--list-algorithms", is_flag=True, help="Show the algorithms with their options, and exit.")
@click.version_option(package_name="offloop", prog_name="trainer")
@click.pass_context
def trainer(ctx: click.Context, list_options: bool, list_algorithms: bool) -> None:
    """Train a model and publish its events for consumers.

    'offloop train TASK --help' shows what a task does and its options; 'trainer' is short for 'offloop train'.

    Exit code: 0 when the training finished, 1 when it failed, 2 for a mistake in the arguments, 130 after Ctrl-C."""
    if list_options:
        _print_options(ctx)
    elif list_algorithms:
        _print_algorithms()
    elif ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def main() -> None:
    run_command(trainer)


def _print_options(context: click.Context) -> None:
    formatter = context.make_formatter()
    write_options(COMMON_OPTIONS, context, formatter)
    click.echo(formatter.getvalue().strip())


def _print_algorithms() -> None:
    with _refusing(), _explaining_what_is_missing():
        import torch  # noqa: F401 - reports what is missing once, not for each algorithm

        from offloop.trainer.algorithms import ALGORITHMS

        click.echo("Algorithms (--algorithms NAME,NAME, or package.module:Class, or file.py:Class)")
        click.echo("\n".join(ALGORITHMS.listing()))


@contextlib.contextmanager
def _explaining_what_is_missing() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigurationError(missing_extra(error.name or "torch")) from None


def _task_command(task: Task) -> click.Command:
    @click.pass_obj
    def run(start: _Start, /, **values: Any) -> None:
        _run_task(task, values, start)

    own = [option for option in task.options if option.name not in OPTION_NAMES]
    return _TaskCommand(
        task.name,
        params=[*own, *itertools.chain(*COMMON_OPTIONS.values())],
        callback=run,
        help=task.help,
        short_help=task.help,
        frequent=(*(option.opts[0] for option in own), *_FREQUENT, "--help"),
    )


def _run_task(task: Task, values: Mapping[str, Any], start: _Start) -> None:
    with _refusing():
        with start.loading(), _explaining_what_is_missing():
            from offloop.trainer.device.device import is_gpu
            from offloop.trainer.distributed.ranks import join_ranks
            from offloop.trainer.stream.run_stream import short_path
            from offloop.trainer.trainer import Trainer
        ranks = join_ranks(on_gpu=is_gpu(values["device"] or "auto"))
        arguments = _arguments(task, values, ranks)
        _check_arguments(task, arguments, inspect.signature(Trainer).parameters)
    # One rank speaks for all.
    say = printing.notice if ranks is None or ranks.rank == 0 else str
    with _refusing():
        made = Trainer(**arguments)
    start.finished = True
    try:
        with _refusing(ConfigurationError), made:
            say(made.introduce())
            made.fit()
    finally:
        if made.recording is not None:
            missing = "" if made.recorded_all else ", INCOMPLETE: some published events could not be recorded"
            say(f"recording: {short_path(made.recording)}{missing}")
        if made.save_folder is not None:
            _show_how_to_resume(made, made.save_folder, arguments, values, say)


def _arguments(task: Task, values: Mapping[str, Any], ranks: "Ranks | None") -> dict[str, Any]:
    """Merge the task's arguments with the given ones, which win."""
    from offloop.bus.runs.directory import new_run_name
    from offloop.trainer.algorithms import ALGORITHMS
    from offloop.trainer.device.seeding import seed_all

    seed = _choose_seed(values)
    if ranks is not None:
        seed = ranks.share(seed)
    seed_all(seed)
    known = {**values, "seed": seed, "device": values["device"] or "auto"}
    settings = trainer_arguments(values)
    config: dict[str, Any] = {"task": task.name}
    if values["algorithms"] or values["algorithm_options"]:
        settings["algorithms"] = ALGORITHMS.create_all(values["algorithms"] or (), values["algorithm_options"] or ())
        config |= {name: values[name] for name in ("algorithms", "algorithm_options") if values[name]}
    names = [str(option.name) for option in task.options]
    options = {name: known[name] for name in names if known[name] is not None}
    for option in task.options:
        if option.required and option.name not in options:
            raise ConfigurationError(f"task {task.name!r} needs {option.opts[0]}: give it")
    defaults = {"seed": seed, "capture_console": True}
    arguments = {**defaults, **task.arguments(**options), **settings, "config": {**config, **options}}
    check_together(values, arguments)
    if arguments.get("run_name") is None:
        prefix = re.sub(r"[^A-Za-z0-9._-]", "-", task.name.rpartition(":")[2]).lstrip("._-") or "run"
        arguments["run_name"] = new_run_name(prefix, arguments.get("runs_dir"))
    return arguments


def _choose_seed(values: Mapping[str, Any]) -> int:
    # A resumed training must draw the same numbers, so its seed follows from the name.
    from offloop.trainer.device.seeding import new_seed

    if values["seed"] is not None:
        seed: int = values["seed"]
        return seed
    return zlib.crc32(values["run_name"].encode()) if values["autoresume"] and values["run_name"] else new_seed()


def _show_how_to_resume(
    made: "Trainer", folder: Path, arguments: Mapping[str, Any], values: Mapping[str, Any], say: Callable[[str], object]
) -> None:
    state = made.state
    if int(state.timestamp.batch) == 0:
        return
    if arguments.get("save_weights_only"):
        say(f"checkpoints: {folder}")
        return
    further = [] if values["run_name"] == state.run_name else [f"--run-name {shlex.quote(state.run_name)}"]
    if not arguments.get("autoresume"):
        further += [*([] if values["seed"] is not None else [f"--seed {state.seed}"]), "--autoresume"]
    if state.max_duration is not None and state.timestamp >= state.max_duration and not state.stopped:
        further.append("and a longer --max-duration" if further else "a longer --max-duration")
    same = f"the same command {'with ' + ' '.join(further) if further else 'again'}"
    say(f"checkpoints: {folder}; to resume, run {same}")


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

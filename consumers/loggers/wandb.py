"""Logs to Weights & Biases, https://docs.wandb.ai."""

import contextlib
import os
import re
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

from offloop.bus.errors import ConfigurationError
from offloop.bus.protocol.snapshot import Snapshot
from offloop.consumers.api.logger import Histogram, Images, LoggerDestination, Row, RunContext, Table, Text, Upload
from offloop.consumers.api.optional import wandb

_ACCOUNTS = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")
_STEP = "step"
_OFFLINE_DIRECTORY = "offline-run-"


class WandBLogger(LoggerDestination):
    """Logs to Weights & Biases: ``pip install 'offloop[wandb]'``.

    Each attempt of a run is a run there, with the id ``IDENTITY-ATTEMPT``; attempts of one run are a group. The column
    ``step``, the x axis of its charts, is the training's step; wandb's own step, which cannot go back, counts log
    calls.

    Metrics are columns, images are ``wandb.Image`` with their masks (in a table named ``NAME Table`` with
    ``use_table``), tables are ``wandb.Table``, a text is a column, files are artifacts with their extension as type,
    hyperparameters are the config.

    A consumer that resumes leaves out what wandb counted already; another consumer, or a replay, leaves out the run's
    existing steps.

    Args:
        project: wandb's project; by default wandb's own choice.
        entity: user or team.
        name: the run's name there; by default ``NAME``, and ``NAME-ATTEMPT`` from the second attempt on.
        group: the run's group; by default the run's name and the start of its identity.
        tags: for filters.
        mode: ``online``, or ``offline`` to write files for ``wandb sync``; by default ``$WANDB_MODE``, or online.
        dir: the parent of wandb's folder ``wandb``; by default the run's directory.
        run_id: the run's id there. Two consumers that log at the same time need one each.
        drain_seconds: how long the consumer waits at its end while nothing can be sent, and wandb for its server.
        finish_seconds: how long wandb may take at the end to send buffered data, such as large files.
    """

    name: ClassVar[str] = "wandb"
    requires: tuple[str, str] = ("wandb", "wandb")
    background = True
    acknowledges = False  # wandb accepts everything at once, and loses unwritten data when this process is killed

    def __init__(
        self,
        project: str | None = None,
        entity: str | None = None,
        name: str | None = None,
        group: str | None = None,
        tags: Sequence[str] = (),
        mode: Literal["online", "offline"] | None = None,
        dir: Path | None = None,
        run_id: str | None = None,
        drain_seconds: float = LoggerDestination.drain_seconds,
        finish_seconds: float = 600.0,
    ) -> None:
        self._project = project
        self._entity = entity
        self._run_name = name
        self._group = group
        self._tags = list(tags)
        self._mode: str = mode or os.environ.get("WANDB_MODE") or "online"
        self._dir = dir
        self._run_id = run_id
        self.drain_seconds = drain_seconds
        self.finish_seconds = finish_seconds
        self._run: Any = None
        self._logged = 0
        self._logged_before = 0
        self._had = 0
        self._left_out_to: int | None = None
        self._goes_on = False
        self._unfinished: str | None = None

    def check(self) -> None:
        super().check()
        # Without an account, wandb would ask at the terminal.
        if self._mode == "online" and not _has_account(wandb.setup().settings):
            raise ConfigurationError(
                "wandb has no account: use 'wandb login', $WANDB_API_KEY, or '-o wandb.mode=offline'"
            )

    def open(self, context: RunContext) -> None:
        patience = max(1.0, self.drain_seconds)
        attempt_name = f"{context.run_name}-{context.attempt}"
        directory = self._dir or context.run_dir
        if self._unfinished is not None and Path(self._unfinished).name.startswith(_OFFLINE_DIRECTORY):
            # All that a killed process had written offline comes again, and its end may be missing.
            shutil.rmtree(self._unfinished, ignore_errors=True)
        self._unfinished = None
        self._run = wandb.init(
            project=self._project,
            entity=self._entity,
            id=self._run_id or f"{context.identity}-{context.attempt}",
            name=self._run_name or (context.run_name if context.attempt == 1 else attempt_name),
            group=self._group or context.unique_name,
            tags=self._tags or None,
            mode=cast(Any, self._mode),
            dir=None if directory is None else str(directory),
            resume=None if self._mode == "offline" else "allow",
            reinit="create_new",
            settings=wandb.Settings(
                silent=True,
                console="off",
                disable_git=True,
                disable_code=True,
                # This process is not the training's, and may run on another machine.
                x_disable_stats=True,
                x_disable_meta=True,
                # The end of the process waits for wandb's timeouts.
                init_timeout=patience,
                finish_timeout=max(patience, self.finish_seconds),
                finish_timeout_raises=True,
            ),
        )
        self._run.define_metric("*", step_metric=_STEP)
        self._had = self._run.starting_step
        if not self._goes_on and self._had:
            # Another consumer's steps: those of this one have other numbers.
            self._logged = self._logged_before = self._had
            self._left_out_to = int(self._run.summary.get(_STEP, -1))
        if self._mode == "offline":
            self._unfinished = str(Path(self._run.dir).parent)
            self.where = f"wandb sync {shlex.quote(self._unfinished)}"
        else:
            self.where = self._run.url

    def log_rows(self, rows: Sequence[Row], state: Snapshot) -> None:
        for row in rows:
            self._log(row.step, row.time, row.metrics)

    def log_hyperparameters(self, hyperparameters: Mapping[str, Any], state: Snapshot) -> None:
        with _refusals():
            self._run.config.update(dict(hyperparameters), allow_val_change=True)

    def log_images(self, entry: Images, state: Snapshot) -> None:
        labels = {} if entry.mask_class_labels is None else {"class_labels": entry.mask_class_labels}
        with _refusals():
            images = [
                wandb.Image(
                    image,
                    masks={name: {"mask_data": masks[index], **labels} for name, masks in entry.masks.items()} or None,
                )
                for index, image in enumerate(entry.images)
            ]
        if entry.use_table:
            table = wandb.Table(columns=[entry.name], data=[[image] for image in images])
            self._log(entry.step, entry.time, {f"{entry.name} Table": table})
        else:
            self._log(entry.step, entry.time, {entry.name: images})

    def log_table(self, entry: Table, state: Snapshot) -> None:
        with _refusals():
            table = wandb.Table(columns=[*entry.columns], data=entry.rows, allow_mixed_types=True)
        self._log(entry.step, entry.time, {entry.name: table})

    def log_histogram(self, entry: Histogram, state: Snapshot) -> None:
        with _refusals():
            histogram = wandb.Histogram(np_histogram=(entry.counts, entry.edges))
        self._log(entry.step, entry.time, {entry.name: histogram})

    def log_text(self, entry: Text, state: Snapshot) -> None:
        self._log(entry.step, entry.time, {entry.name: entry.text})

    def upload_file(self, entry: Upload, state: Snapshot) -> None:
        name = re.sub(r"[^a-zA-Z0-9_.-]", ".", entry.remote_file_name)
        file_name = entry.remote_file_name.rpartition("/")[2]
        epoch, batch = state.timestamp.values.epoch, state.timestamp.values.batch
        with _refusals():
            artifact = wandb.Artifact(name, Path(file_name).suffix.lstrip(".") or "file", metadata={"batch": batch})
            artifact.add_file(str(entry.file_path), name=file_name)
        self._run.log_artifact(artifact, aliases=["latest", f"ep{epoch}-ba{batch}"])

    def close(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.finish()
            self._logged_before = self._logged
            self._unfinished = None

    def state_dict(self) -> dict[str, Any]:
        """Return the count at the opening of the run, which is safe, and the unfinished run."""
        return {"logged": self._logged_before, "left_out_to": self._left_out_to, "unfinished": self._unfinished}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._logged = self._logged_before = state["logged"]
        self._left_out_to, self._unfinished = state["left_out_to"], state["unfinished"]
        self._goes_on = True

    def _log(self, step: int, time: float, values: Mapping[str, Any]) -> None:
        if self._left_out_to is not None and step <= self._left_out_to:
            return
        number, self._logged = self._logged, self._logged + 1
        if number >= self._had:
            with _refusals():
                self._run.log({_STEP: step, "_timestamp": time, **values}, step=number)


def _has_account(settings: Any) -> bool:
    from requests.utils import get_netrc_auth

    named = settings.api_key or any(os.environ.get(name) for name in _ACCOUNTS)
    return bool(named or get_netrc_auth(settings.base_url))


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError) as error:
        raise ConfigurationError(f"wandb refuses it: {error}") from None

"""Checkpoints, written beside the running training."""

import logging
import tempfile
from pathlib import Path
from typing import Any, get_args

from offloop.bus.checkpoints.announced import announce_checkpoint
from offloop.bus.checkpoints.image import read_contents, write_draft
from offloop.bus.checkpoints.names import CheckpointName, CheckpointNames
from offloop.bus.checkpoints.ratings import Ratings
from offloop.bus.errors import ConfigurationError, FieldNotAvailableError, check_choice
from offloop.bus.printing import say
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.types.demand import BASE_EVENTS, Demand, EventDemand
from offloop.bus.types.event import Event
from offloop.bus.types.intervals import AT_END, check_interval
from offloop.bus.types.metrics import Mode, direction_of
from offloop.bus.types.time import Time, TimeUnit
from offloop.bus.types.timestamp import Timestamp
from offloop.consumers.api.callback import Callback
from offloop.consumers.api.logger import Logger
from offloop.consumers.callbacks.monitored_metric import MonitoredMetric

_log = logging.getLogger("offloop")

_BOUNDARIES = (Event.BATCH_CHECKPOINT, Event.EPOCH_CHECKPOINT, Event.ITERATION_CHECKPOINT)


_FOLDER = "{run_name}/checkpoints"
_USUALLY_KEPT = 3


class CheckpointSaver(Callback):
    """Writes checkpoints at an interval and at the end; the training only waits while its state is copied.

    The files are those that ``Trainer(save_folder=...)`` writes at the same moment, byte for byte. A large state goes
    through shared memory, so the consumer has to run on the trainer's machine, or fetches it over the network, and a
    replay has none. When no shared memory is free, the checkpoint comes after the epoch or the next batch, named after
    that time. Of several ranks only the weights are available (``weights_only``).

    With ``monitor`` it also finds the best ones by the metric's value at the same batch, so save when the model is
    evaluated; without a finite value a checkpoint is never the best. The values are in ``checkpoints.json`` beside the
    checkpoints, see :mod:`offloop.bus.checkpoints.ratings`.

    Args:
        folder: a format string as ``filename``, such as ``{run_name}/checkpoints``; by default ``checkpoints`` in the
            run's folder, which a line on standard error names.
        filename: the name of each checkpoint, see :class:`offloop.bus.checkpoints.names.CheckpointNames`.
        remote_file_name: its name for loggers that store files; ``None`` to upload none.
        latest_filename: a link to the newest one; ``None`` for none.
        latest_remote_file_name: the name, without ``.symlink``, of a file for those loggers that holds the remote name
            of the newest one; ``None`` for none.
        save_interval: a time such as ``1ep``, ``500ba`` or ``0.1dur``, or a number of epochs; 0 for never.
        overwrite: replace checkpoints in the folder that are of a later time than the training's.
        num_checkpoints_to_keep: how many of the newest stay; -1 for all, or with ``keep`` for the newest one alone; 0
            for none once they are uploaded. By default -1 with a ``monitor``; else three, and for an evaluated training
            the best one: by the first metric whose greatest value is the best, or else whose least one is.
        weights_only: save the model alone.
        monitor: full or short name of the metric that compares checkpoints, such as ``loss/train/total`` or
            ``MulticlassAccuracy``; a short name prefers the evaluation's metric.
        mode: ``min`` or ``max`` is the best. Not needed for a metric whose name says it, see
            :func:`offloop.bus.types.metrics.direction_of`.
        keep: how many of the best stay, beside the newest; by default the best one of those that
            ``num_checkpoints_to_keep`` would remove.
        best_filename: a link to the best one, with ``monitor``; ``None`` for none.

    Raises :class:`offloop.bus.errors.ConfigurationError` for an invalid name or interval, and
    :class:`offloop.consumers.CannotWorkError` when several metrics have the name. Reference:
    ``composer/callbacks/checkpoint_saver.py``, which has no ``monitor``."""

    background: bool = True

    def __init__(
        self,
        folder: str | None = None,
        filename: str = "ep{epoch}-ba{batch}-rank{rank}.safetensors",
        remote_file_name: str | None = "{run_name}/checkpoints/ep{epoch}-ba{batch}-rank{rank}.safetensors",
        latest_filename: str | None = "latest-rank{rank}.safetensors",
        latest_remote_file_name: str | None = "{run_name}/checkpoints/latest-rank{rank}.safetensors",
        save_interval: int | str | Time = "1ep",
        overwrite: bool = False,
        num_checkpoints_to_keep: int | None = None,
        weights_only: bool = False,
        monitor: str | None = None,
        mode: Mode | None = None,
        keep: int | None = None,
        best_filename: str | None = "best-rank{rank}.safetensors",
    ) -> None:
        _check_comparison(monitor, mode, keep)
        interval = Time.from_input(save_interval, TimeUnit.EPOCH)
        is_usual = monitor is None and num_checkpoints_to_keep is None and interval.value > 0
        if num_checkpoints_to_keep is None:
            num_checkpoints_to_keep = _USUALLY_KEPT if is_usual else -1
        self._metric = MonitoredMetric(monitor) if is_usual or monitor is not None else None
        self._mode = mode or (None if monitor is None else direction_of(monitor))
        self._arguments: dict[str, Any] = {
            "folder": _FOLDER if folder is None else folder,
            "filename": filename,
            "latest_filename": latest_filename,
            "keep": num_checkpoints_to_keep,
            "overwrite": overwrite,
            "best_filename": None if self._metric is None else best_filename,
            "keep_best": keep,
        }
        self._is_in_run = folder is None
        self._remote_names = {"remote_file_name": remote_file_name, "latest_remote_file_name": latest_remote_file_name}
        self._overwrite = overwrite
        # Refuses invalid names before the run is known.
        self._name_elsewhere(_Folder(**self._arguments, names={"run_name": "run"}))
        self._interval = f"{check_interval(str(interval))}+{AT_END}" if interval.value else None
        self._keep = num_checkpoints_to_keep
        self._field = "weights_checkpoint" if weights_only else "checkpoint"
        self._weights_only = weights_only
        self._folder: _Folder | None = None
        self._known: dict[str, Any] = {"saved": []}
        self._last_saved: Timestamp | None = None
        self._ratings: Ratings | None = None
        self._has_warned = False
        self._is_checked = False
        self._is_refused = False
        self._links: tempfile.TemporaryDirectory[str] | None = None
        self._uploads = 0

    @property
    def saved_checkpoints(self) -> list[Path]:
        """Existing saved checkpoints, oldest first."""
        folder = self._folder
        return [] if folder is None else [folder.folder / name for name in folder.state_dict()["saved"]]

    def demand(self) -> Demand:
        """Return the requests for checkpoints and for the events with values to compare them by.

        A checkpoint is requested at every interval and at the end of the training; once more when the model has been
        evaluated after that, or the training was stopped after the events of its last batch."""
        events: dict[Event, EventDemand] = {Event.FIT_START: EventDemand()}
        if self._interval is not None:
            due = EventDemand(self._interval, {self._field: self._interval})
            at_end = EventDemand(AT_END, {self._field: AT_END})
            events |= {**dict.fromkeys(_BOUNDARIES, due), Event.FIT_END: at_end}
            if not self._weights_only:
                events[Event.EVAL_AFTER_ALL] = at_end
        if self._metric is None:
            return Demand(events)
        with_values = (Event.EVAL_END,) if self._metric.name is None else BASE_EVENTS
        return Demand.merge([Demand.of(with_values), Demand(events)])

    def run_event(self, event: Event, state: Snapshot, logger: Logger) -> None:
        if self._metric is not None:
            self._metric.take_in(event, state)
        super().run_event(event, state, logger)
        if self._folder is not None and self._rate(self._folder):
            self._settle(self._folder, logger.context.run_dir)

    def fit_start(self, state: Snapshot, logger: Logger) -> None:
        folder = self._begin(state, logger.context.run_dir)
        if self._ratings is not None:
            self._ratings.forget_after(state.timestamp.values.batch)
            # Earlier attempts' checkpoints are unknown, unless their callback states were kept.
            saved = folder.state_dict()["saved"]
            folder.load_state_dict({"saved": [*(name for name in self._ratings if name not in saved), *saved]})
        if self._is_checked or self._interval is None:
            return
        self._is_refused = True
        folder.began = state.time
        folder.check_conflicts(state.timestamp)
        self._is_checked, self._is_refused = True, False

    def batch_checkpoint(self, state: Snapshot, logger: Logger) -> None:
        folder = self._begin(state, logger.context.run_dir)
        if self._is_due(state) and not self._is_saved(state):
            self._save(folder, state, state.timestamp, logger)

    def epoch_checkpoint(self, state: Snapshot, logger: Logger) -> None:
        self.batch_checkpoint(state, logger)

    def iteration_checkpoint(self, state: Snapshot, logger: Logger) -> None:
        self.batch_checkpoint(state, logger)

    def fit_end(self, state: Snapshot, logger: Logger) -> None:
        self.batch_checkpoint(state, logger)

    def eval_after_all(self, state: Snapshot, logger: Logger) -> None:
        folder = self._begin(state, logger.context.run_dir)
        if self._is_due(state) and self._is_saved(state) and self._last_saved is not None:
            self._save(folder, state, self._last_saved, logger)

    def close(self, state: Snapshot, logger: Logger) -> None:
        if self._folder is not None:
            self._warn_if_unrated(self._folder, state)
            self._remove_uploaded(self._folder)

    def post_close(self) -> None:
        if self._links is not None:
            self._links.cleanup()

    def state_dict(self) -> dict[str, Any]:
        last = None if self._last_saved is None else list(self._last_saved.values)
        known = self._known if self._folder is None else self._folder.state_dict()
        metric = {} if self._metric is None else {"metric": self._metric.state_dict(), "warned": self._has_warned}
        return {**known, "last": last, "checked": self._is_checked, "refused": self._is_refused, **metric}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._known = {"saved": list(state["saved"])}
        self._last_saved = None if state["last"] is None else Timestamp.from_values(state["last"])
        self._is_checked, self._is_refused = state["checked"], state["refused"]
        if self._metric is not None and "metric" in state:
            self._metric.load_state_dict(state["metric"])
            self._has_warned = state["warned"]

    def _begin(self, state: Snapshot, run_dir: Path | None) -> "_Folder":
        """Return the folder, which is named after the run, without uploaded checkpoints."""
        if self._folder is None:
            names: dict[str, str | int] = {
                "run_name": state.run_name,
                "rank": state.rank,
                "world_size": state.world_size,
            }
            if self._is_in_run and run_dir is not None:
                self._arguments["folder"] = (
                    str(run_dir.absolute() / "checkpoints").replace("{", "{{").replace("}", "}}")
                )
            self._folder = _Folder(**self._arguments, names=names)
            if self._is_in_run and self._interval is not None:
                say(f"run {state.run_name}: checkpoints are saved in {self._folder.folder}{self._kept}", err=True)
            self._folder.run_name = state.run_name
            self._folder.load_state_dict(self._known)
            self._folder.clean()
            if self._metric is not None:
                self._ratings = Ratings(self._folder.folder, state.run_name, self._mode)
                self._folder.ranking = self._ratings.ranking
        self._remove_uploaded(self._folder)
        return self._folder

    @property
    def _kept(self) -> str:
        if self._keep == 0:
            return " until they are uploaded"
        best = self._arguments["keep_best"]
        if self._keep < 0 and best is None:
            return ""
        newest = f"the newest {self._keep if self._keep > 1 else 'one'}"
        by = "" if self._metric is None else f" and the best {best or 'one'}"
        if self._metric is not None:
            by += f" by {self._metric.name or 'what evaluations measure'}"
        return f"; {newest}{by} stay"

    def _is_due(self, state: Snapshot) -> bool:
        # Before its first batch the training is in its initial or resumed state.
        return self._field in state.on_demand and not self._is_refused and state.previous_timestamp is not None

    def _is_saved(self, state: Snapshot) -> bool:
        return self._last_saved is not None and self._last_saved.values.batch == state.timestamp.values.batch

    def _save(self, folder: "_Folder", state: Snapshot, named: Timestamp, logger: Logger) -> None:
        self._warn_if_unrated(folder, state)
        path, saved = folder.path_at(named), folder.state_dict()["saved"]
        try:
            draft = getattr(state, self._field)
        except FieldNotAvailableError as error:
            # Perhaps this process was killed just after it had written the file.
            if not folder.holds(path, state.timestamp):
                _log.warning("run %s: no checkpoint of batch %s: %s", state.run_name, state.timestamp.batch, error)
                return
            folder.place(named, lambda _: None)
        else:
            folder.place(named, lambda path: write_draft(path, draft, saved))
        self._last_saved = named
        if self._ratings is not None:
            self._ratings.forget(folder.name_at(named))
            self._rate(folder)
        self._upload(folder, path, named, logger)
        self._settle(folder, logger.context.run_dir)

    def _rate(self, folder: "_Folder") -> bool:
        if self._metric is None or self._ratings is None or self._last_saved is None:
            return False
        newest, batch = self._metric.newest, self._last_saved.values.batch
        if newest is None or newest.batch != batch:
            return False
        return self._ratings.add(folder.name_at(self._last_saved), batch, newest.metric, newest.value)

    def _settle(self, folder: "_Folder", run_dir: Path | None) -> None:
        if self._ratings is not None:
            surplus = set(folder.surplus())
            self._ratings.write(lambda name: name not in surplus and (folder.folder / name).is_file())
            folder.point_to_best()
        # With keep 0, files are removed after the upload.
        if self._keep != 0:
            folder.remove_surplus()
            if run_dir is not None and self._last_saved is not None:
                name, reached = folder.name_at(self._last_saved), self._last_saved.values
                score = None if self._ratings is None else self._ratings.score(name)
                announce_checkpoint(run_dir, folder.folder / name, reached.epoch, reached.batch, score)

    def _warn_if_unrated(self, folder: "_Folder", state: Snapshot) -> None:
        if self._ratings is None or self._metric is None or self._last_saved is None or self._has_warned:
            return
        if self._metric.name is None:
            return
        name = folder.name_at(self._last_saved)
        if name not in self._ratings and (folder.folder / name).is_file():
            self._has_warned = True
            _log.warning(
                "run %s: checkpoint %s is not compared: no value of %r came with its batch; save when the model is "
                "evaluated, or use another monitor ('offloop show' lists the metrics)",
                *(state.run_name, name, self._metric.name),
            )

    def _upload(self, folder: "_Folder", path: Path, named: Timestamp, logger: Logger) -> None:
        remote, latest_remote = self._name_elsewhere(folder)
        if remote is None:
            return
        logger.upload_file(remote.at(named), path, overwrite=self._overwrite)
        if latest_remote is not None:
            if self._links is None:
                self._links = tempfile.TemporaryDirectory(prefix="offloop-")
            self._uploads += 1
            link = Path(self._links.name) / f"latest.{self._uploads}.symlink"
            link.write_text(remote.at(named))
            logger.upload_file(f"{latest_remote.at(named)}.symlink", link, overwrite=True)

    def _name_elsewhere(self, folder: "_Folder") -> tuple[CheckpointName | None, CheckpointName | None]:
        remote, latest = (
            None if name is None else folder.other_name(name, argument) for argument, name in self._remote_names.items()
        )
        return remote, latest

    def _remove_uploaded(self, folder: "_Folder") -> None:
        if self._keep == 0:
            folder.remove_surplus()


def _check_comparison(monitor: str | None, mode: Mode | None, keep: int | None) -> None:
    if mode is not None:
        check_choice("mode", mode, get_args(Mode))
    if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
        raise ConfigurationError(f"keep={keep!r} is not allowed: use a number of checkpoints from 1 on")
    if monitor is None and (mode is not None or keep is not None):
        given = "mode" if keep is None else "keep"
        raise ConfigurationError(
            f"{given} requires a monitor, such as loss/train/total; num_checkpoints_to_keep is for the newest ones"
        )
    if monitor is not None and mode is None and direction_of(monitor) is None:
        raise ConfigurationError(
            f"the name of monitor {monitor!r} does not say which values are better: give mode, min or max"
        )


class _Folder(CheckpointNames):
    run_name = ""
    began = 0.0

    def holds(self, path: Path, timestamp: Timestamp) -> bool:
        return self._run_of(path) == self.run_name and self._time_of(path) == timestamp.values

    def _run_of(self, path: Path) -> Any:
        tree = (read_contents(path) or {}).get("tree")
        run = tree.get("run") if isinstance(tree, dict) else None
        return run.get("name") if isinstance(run, dict) else None

    def _is_in_the_way(self, path: Path) -> bool:
        # Not files that this consumer has written before it was killed, or in an earlier replay.
        return self._run_of(path) != self.run_name or path.stat().st_mtime < self.began

"""Writes the checkpoints of a trainer, and loads the one to resume from."""

import contextlib
import errno
import logging
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgpack

from offloop.bus.checkpoints.announced import announce_checkpoint
from offloop.bus.checkpoints.image import main_file
from offloop.bus.errors import CheckpointError, ConfigurationError
from offloop.bus.types.event import Event
from offloop.bus.types.time import Time
from offloop.bus.types.timestamp import Timestamp
from offloop.trainer.arguments.config import CheckpointConfig
from offloop.trainer.arguments.durations import Interval, check_interval
from offloop.trainer.arguments.values import optimizer_names
from offloop.trainer.checkpoints.file import (
    read_checkpoint,
    read_part,
    read_weights,
    write_checkpoint,
)
from offloop.trainer.checkpoints.folder import CheckpointFolder
from offloop.trainer.checkpoints.sharded import read_sharded, write_shards
from offloop.trainer.checkpoints.training_state import (
    load_model,
    load_schedulers,
    load_training,
    training_tree,
    weights_tree,
)
from offloop.trainer.data.resume import DataLoaderResume
from offloop.trainer.distributed.ranks import Ranks, local_world_size
from offloop.trainer.distributed.sampling import own_sampler
from offloop.trainer.engine.state import State

if TYPE_CHECKING:
    from offloop.trainer.distributed.sharding import FullySharded

_log = logging.getLogger("offloop")
_EVENTS = (Event.EPOCH_CHECKPOINT, Event.ITERATION_CHECKPOINT, Event.BATCH_CHECKPOINT)


class Checkpoints:
    """Loads the checkpoint to resume from, and writes new ones at an interval and at the end, one at most per batch.

    Without a folder it writes none. An evaluation at the end of the training is added to the last checkpoint. The first
    rank writes them; with ``sharded`` each rank writes its part of the weights. Reference:
    ``composer/callbacks/checkpoint_saver.py``, except for the evaluation."""

    def __init__(
        self, config: CheckpointConfig, state: State, ranks: Ranks | None, *, has_run_name: bool, sharded: bool = False
    ) -> None:
        if config.autoresume and (config.save_folder is None or not has_run_name):
            missing = "save_folder" if config.save_folder is None else "run_name"
            raise ConfigurationError(f"autoresume needs a {missing}, to find the run's latest checkpoint: give one")
        if config.autoresume and config.save_weights_only:
            raise ConfigurationError("autoresume cannot resume from weights alone: leave out save_weights_only")
        self._config = config
        self._state = state
        self._ranks = ranks
        self._sharded = sharded
        self.loader_resume: DataLoaderResume = DataLoaderResume()
        self._interval = check_interval(config.save_interval, "save_interval")
        self._load_path = None if config.load_path is None else Path(config.load_path)
        self._load_weights_only = config.load_weights_only
        self._schedulers: tuple[Any, Path] | None = None
        self._resumes_at = Timestamp()
        self.saved_name: str | None = None  # name of the run in the checkpoint to resume from, set by check
        self._planned: Interval | None = None
        self._last_batch: int | None = None
        self._last_evaluation: Any = None
        self._has_saved = False
        self.watched: frozenset[Event] = frozenset()
        self._folder: CheckpointFolder | None = None
        self.announce: Callable[..., object] | None = None
        """Marks in the stream, on the first rank, a saved or loaded checkpoint: ``Publisher.mark_checkpoint``."""
        self.run_dir: Path | None = None  # directory of the run, on the first rank, where written files are announced
        self.resumed: bool = False  # whether the training resumes from a checkpoint of the same run
        self.sampler_seed: int | None = None
        self.microbatch_size: int | None = None
        self.use_run_name()
        if self._folder is not None and config.autoresume:
            newest = self._latest(self._folder, config.from_scratch)
            if newest is not None:
                self._load_path, self._load_weights_only, self.resumed = newest, False, True
        self.is_next_attempt: bool = config.autoresume or (self._load_path is not None and not self._load_weights_only)
        """Whether the training resumes its run, even without a checkpoint yet."""

    def use_run_name(self) -> None:
        config = self._config
        self._has_saved = False
        if config.save_folder is not None:
            unreadable = {} if self._folder is None else self._folder.unreadable
            self._folder = self._open(config.save_folder)
            self._folder.unreadable |= unreadable

    def _open(self, folder: str | os.PathLike[str]) -> CheckpointFolder:
        config = self._config
        return CheckpointFolder(
            folder,
            filename=config.save_filename,
            latest_filename=config.save_latest_filename,
            keep=config.save_num_checkpoints_to_keep,
            overwrite=config.save_overwrite,
            names=_names(self._state),
        )

    def _latest(self, folder: CheckpointFolder, from_scratch: bool | None = None) -> Path | None:
        """Return the newest intact checkpoint; raises on every rank if all are damaged, unless ``from_scratch``."""

        def find() -> str | None:
            found, unreadable = folder.latest(), folder.unreadable
            if found is None and unreadable and not from_scratch:
                newest = folder.newest_unreadable()
                several = f"none of the {len(unreadable)} checkpoints in {folder.folder} can be read"
                which = several if len(unreadable) > 1 else f"the checkpoint in {folder.folder} cannot be read"
                anew = ", or start from the beginning and keep these files with from_scratch=True (--from-scratch)"
                raise CheckpointError(
                    f"{which}: use another folder{'' if from_scratch is None else anew}; the newest: {newest}",
                    path=newest.path,
                )
            if self._folder is not None:
                self._folder.unreadable |= unreadable
            for path, error in unreadable.items():
                _log.warning("checkpoint %s is skipped and kept: %s", path.name, error)
            return None if found is None else str(found)

        path = find() if self._ranks is None else self._ranks.each(find, among={0})[0]
        return None if path is None else Path(path)

    def check(self) -> None:
        """Check, before anything is started, that the checkpoint to resume from can be read, except its tensors."""
        if self._load_path is not None:
            self._load_path = path = self._find(self._load_path)
            if self._load_weights_only:
                if not path.exists():
                    raise CheckpointError(
                        f"there is no checkpoint {path}: give the path of a file that was saved", path=path
                    )
            else:
                self._resumes_at = Timestamp.from_values(read_part(main_file(path), "timestamp"))
                self.saved_name = read_part(main_file(path), "run").get("name")

    def check_folder(self) -> None:
        if self._folder is not None and self._state.rank == 0:
            _make_writable(self._folder.folder)
        self.check_conflicts(self._resumes_at)

    def load(self, sharding: "FullySharded | None" = None) -> None:
        """Restore the training from its checkpoint, except the schedulers."""
        path, state = self._load_path, self._state
        if path is None:
            return
        if self._load_weights_only:
            load_model(state, self._read_weights(path, sharding), path, self._config.load_strict_model_weights)
            return
        tree = self._read(path, sharding)
        load_model(state, tree.get("model", {}), path, self._config.load_strict_model_weights)
        load_training(state, tree, path)
        self._schedulers = (tree["schedulers"], path)
        self.sampler_seed, self.microbatch_size = tree.get("sampler_seed"), tree["microbatch_size"]
        orders = tree.get("dataloader")
        # A rank that did not exist before draws its own numbers.
        if orders and state.rank < len(orders):
            self.loader_resume.load(orders[state.rank])
        if self._folder is not None and self.resumed:
            self._folder.load_state_dict(tree.get("checkpoints") or {})
            self._folder.adopt(path)
        if state.rank == 0 and self.announce is not None:
            self.announce("load", state.timestamp.values, tree.get("run", {}).get("name"))

    @property
    def folder(self) -> Path | None:
        return None if self._folder is None else self._folder.folder

    @property
    def resumed_from(self) -> Path | None:
        return self._load_path if self.resumed else None

    def plan(self, max_duration: Time) -> None:
        state = self._state
        if self._last_batch is None:
            if self._folder is not None and state.rank == 0:
                self._folder.check_conflicts(state.timestamp)
                self._folder.clean()
            # The state with which a training starts or resumes need not be written again.
            self._note_saved()
        if self._folder is not None:
            self._planned = Interval(self._interval, max_duration, state.dataloader_len, _EVENTS)
            self.watched = frozenset() if self._planned.is_never else frozenset(_EVENTS)

    def save_if_due(self, event: Event) -> None:
        state = self._state
        if event not in self.watched or state.timestamp.values.batch == self._last_batch:
            return
        assert self._planned is not None  # plan() has set both
        if self._planned.is_due(event, state.timestamp, state.previous_timestamp) or state.reached_max_duration():
            self.save_now()

    def save_last(self) -> None:
        """Write the last checkpoint of this training again if the model has been evaluated since."""
        state = self._state
        if self._folder is None or not self._has_saved or self._config.save_weights_only:
            return
        # Each evaluation makes a new object.
        if self._last_batch == state.timestamp.values.batch and self._last_evaluation is not state.eval_metric_values:
            self._save(self._folder.last_path, self._folder.replace_last)

    def save_now(self) -> Path | None:
        """Write a checkpoint unless this batch has one; all ranks must call it. Returns the path on the first rank."""
        if self._folder is None:
            raise ConfigurationError("this training saves no checkpoints: start it with a save_folder")
        if self._last_batch != self._state.timestamp.values.batch:
            timestamp = self._state.timestamp
            self._save(self._folder.path_at(timestamp), partial(self._folder.save, timestamp))
            self._has_saved = True
        return self._folder.last_path

    def write(self, path: Path) -> Path:
        """Write a separate checkpoint; all ranks must call it."""
        self._write(path, partial(write_checkpoint, path))
        return path

    def _save(self, path: Path | None, write: Callable[[dict[str, Any], Path | None], object]) -> None:
        self._write(path, write)
        self._note_saved()

    def _note_saved(self) -> None:
        self._last_batch = self._state.timestamp.values.batch
        self._last_evaluation = self._state.eval_metric_values

    def _write(self, path: Path | None, write: Callable[[dict[str, Any], Path | None], object]) -> None:
        """Let the first rank write a checkpoint; every rank raises its error."""
        weights_only = self._config.save_weights_only
        tree, shards = weights_tree(self._state) if weights_only else self.gather(), None

        def write_on_first() -> None:
            # A training does not resume from weights alone.
            if self.announce is not None and not weights_only:
                self.announce("save", self._state.timestamp.values)
            write(tree, shards)
            if self.run_dir is not None and path is not None:
                reached = self._state.timestamp.values
                announce_checkpoint(self.run_dir, path, reached.epoch, reached.batch, None)

        if self._ranks is None:
            write_on_first()
            return
        with contextlib.ExitStack() as stack:
            if self._sharded:
                tree, shards = stack.enter_context(write_shards(path, tree, self._ranks))
            self._ranks.each(write_on_first, among={0})

    def gather(self) -> dict[str, Any]:
        """Return the contents of a whole checkpoint of this moment; all ranks must call it."""
        state, ranks = self._state, self._ranks
        dataloader, orders = state.train_dataloader, None
        if dataloader is not None:
            own = self.loader_resume.tree(dataloader, state.timestamp.values.batch_in_epoch > 0)
            orders = [own]
            if ranks is not None:
                orders = [msgpack.unpackb(one, strict_map_key=False) for one in ranks.collect(msgpack.packb(own))]
        sampler = own_sampler(dataloader)
        return {
            **training_tree(state),
            "dataloader": orders,
            "sampler_seed": None if sampler is None else sampler.seed,
            "checkpoints": None if self._folder is None else self._folder.state_dict(),
        }

    def load_schedulers(self) -> None:
        if self._schedulers is not None:
            saved, path = self._schedulers
            self._schedulers = None
            load_schedulers(self._state, saved, path)

    def check_conflicts(self, timestamp: Timestamp) -> None:
        if self._folder is not None and self._state.rank == 0:
            self._folder.check_conflicts(timestamp)

    def forget(self) -> None:
        """Forget the checkpoint, for a training that starts from the beginning."""
        self._last_batch = None
        self._has_saved = self.resumed = False

    def _read(self, path: Path, sharding: "FullySharded | None") -> dict[str, Any]:
        if path.is_dir():
            return self._read_sharded(path, sharding)
        tree, optimizers = read_checkpoint(path), self._state.optimizers
        if sharding is None:
            return tree
        return sharding.shard_tree(tree, dict(zip(optimizer_names(optimizers), optimizers, strict=True)))

    def _read_weights(self, path: Path, sharding: "FullySharded | None") -> Any:
        if path.is_dir():
            return self._read_sharded(path, sharding, "model")["model"]
        weights = read_weights(path)
        return weights if sharding is None else sharding.shard_tree({"model": weights}, {})["model"]

    def _read_sharded(self, path: Path, sharding: "FullySharded | None", part: str | None = None) -> dict[str, Any]:
        state, tree = self._state, dict[str, Any]()
        own = () if sharding is None else (state.rank, state.world_size, sharding.spread)

        def read() -> None:
            tree.update(read_sharded(path, part, *own))

        if self._ranks is None:
            read()
        else:
            self._ranks.each(read)
        return tree

    def _find(self, path: Path) -> Path:
        if not path.is_dir() or main_file(path).is_file():
            return path
        latest = self._latest(self._open(path))
        if latest is None:
            raise CheckpointError(
                f"there is no checkpoint in {path}: give a file, or a folder with checkpoints", path=path
            )
        return latest


def _make_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise CheckpointError(
            f"save_folder {folder} cannot be made or written to: {error.strerror}; choose another one, or change its "
            "mode",
            path=folder,
        ) from None


def _names(state: State) -> dict[str, Any]:
    return {
        "run_name": state.run_name,
        "rank": state.rank,
        "world_size": state.world_size,
        "local_rank": int(os.environ.get("LOCAL_RANK", 0)),
        "local_world_size": local_world_size(1),
        "node_rank": int(os.environ.get("GROUP_RANK", 0)),
    }

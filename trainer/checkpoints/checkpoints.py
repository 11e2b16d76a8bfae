"""Checkpoints of a trainer: where they are written, and which one a training resumes from."""

import errno
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgpack

from offloop.bus.errors import CheckpointError, ConfigurationError
from offloop.bus.types.time import Time
from offloop.bus.types.timestamp import Timestamp, TrainingTime
from offloop.trainer.arguments.config import CheckpointConfig
from offloop.trainer.arguments.durations import check_interval
from offloop.trainer.arguments.values import optimizer_names
from offloop.trainer.checkpoints.file import (
    import_torch,
    is_torch_file,
    read_checkpoint,
    read_part,
    read_weights,
    write_checkpoint,
)
from offloop.trainer.checkpoints.folder import CheckpointFolder
from offloop.trainer.checkpoints.saver import Announce, TrainingSaver
from offloop.trainer.checkpoints.sharded import is_sharded, on_first, read_sharded, training_file, write_sharded
from offloop.trainer.checkpoints.training_state import (
    load_model,
    load_schedulers,
    load_training,
    training_tree,
    weights_tree,
)
from offloop.trainer.data.resume import DataLoaderResume
from offloop.trainer.data.spec import DataSpec
from offloop.trainer.distributed.ranks import Ranks, local_world_size
from offloop.trainer.distributed.sampling import own_sampler
from offloop.trainer.engine.state import State
from offloop.trainer.evaluation.evaluation import Evaluation

if TYPE_CHECKING:
    from offloop.trainer.distributed.sharding import FullySharded

_log = logging.getLogger("offloop")


class Checkpoints:
    """Loads the checkpoint that a training resumes from, and makes the saver of new ones.

    With ``sharded`` the new ones are folders, see :mod:`offloop.trainer.checkpoints.sharded`, with the names of files
    without the suffix and the rank."""

    def __init__(
        self,
        config: CheckpointConfig,
        state: State,
        loader_resume: DataLoaderResume,
        *,
        has_run_name: bool,
        ranks: Ranks | None,
        sharded: bool = False,
    ) -> None:
        if config.autoresume and (config.save_folder is None or not has_run_name):
            missing = "save_folder" if config.save_folder is None else "run_name"
            raise ConfigurationError(f"autoresume needs a {missing}, to find the run's latest checkpoint: give one")
        if config.autoresume and config.save_weights_only:
            raise ConfigurationError("autoresume cannot resume from weights alone: leave out save_weights_only")
        self._state = state
        self._loader_resume = loader_resume
        self._ranks = ranks
        self._sharded = sharded
        self._interval = check_interval(config.save_interval, "save_interval")
        self._weights_only = config.save_weights_only
        self._load_path = None if config.load_path is None else Path(config.load_path)
        self._load_weights_only = config.load_weights_only
        self._strict = config.load_strict_model_weights
        self._overwrite = config.save_overwrite
        self._filenames = (config.save_filename, config.save_latest_filename)
        self._schedulers: tuple[Any, Path] | None = None
        self._resumes_at = Timestamp()
        self.saved_name: str | None = None
        """The name of the run that the checkpoint to resume from is of, once that was looked at."""
        self._saver: TrainingSaver | None = None
        self._folder: CheckpointFolder | None = None
        self.announce: Announce = _announce_nothing
        """Called on the first rank where a checkpoint is saved and where one was loaded."""
        self.resumed = False
        """Whether the training resumes from a checkpoint of the same run."""
        self.sampler_seed: int | None = None
        """The seed of the sampler in the checkpoint that the training resumes from."""
        self.microbatch_size: int | None = None
        """The size of microbatches in it."""
        self._save_folder, self._keep = config.save_folder, config.save_num_checkpoints_to_keep
        self.use_run_name()
        if self._folder is not None and config.autoresume:
            newest = self._latest([self._folder], config.from_scratch)
            if newest is not None:
                self._load_path, self._load_weights_only, self.resumed = newest, False, True
        self.is_next_attempt = config.autoresume or (self._load_path is not None and not self._load_weights_only)
        """Whether the training resumes its run, also where that has no checkpoint yet."""

    def use_run_name(self) -> None:
        """Writes checkpoints to the folder of the state's run name from now on."""
        sharded, ranks = self._sharded, self._ranks
        if self._save_folder is not None:
            filename, latest = self._filenames
            unreadable = {} if self._folder is None else self._folder.unreadable
            self._folder = CheckpointFolder(
                self._save_folder,
                filename=folder_name(filename) if sharded else filename,
                latest_filename=folder_name(latest) if sharded and latest else latest,
                keep=self._keep,
                overwrite=self._overwrite,
                names=_names(self._state),
                write=partial(_write, sharded=sharded, ranks=ranks),
            )
            self._folder.unreadable |= unreadable
        # Nothing that holds this object: a trainer that is dropped is to be gone at once.
        self._gather = partial(_gather, self._state, self._loader_resume, ranks, self._folder)

    def _latest(self, folders: Sequence[CheckpointFolder], from_scratch: bool | None = None) -> Path | None:
        """The newest checkpoint in the first of some folders that has one, found by the first rank.

        Raises ``CheckpointError``, on every rank, when all of them are damaged, unless the training begins anew then;
        ``from_scratch`` is ``None`` where it cannot."""

        def find() -> str | None:
            found = next((path for folder in folders if (path := folder.latest()) is not None), None)
            unreadable = {path: error for folder in folders for path, error in folder.unreadable.items()}
            if found is None and unreadable and not from_scratch:
                newest = next(folder for folder in folders if folder.unreadable).newest_unreadable()
                several = f"none of the {len(unreadable)} checkpoints in {folders[0].folder} can be read"
                which = several if len(unreadable) > 1 else f"the checkpoint in {folders[0].folder} cannot be read"
                anew = ", or start from the beginning and keep these files with from_scratch=True (--from-scratch)"
                raise CheckpointError(
                    f"{which}: use another folder{'' if from_scratch is None else anew}; the newest: {newest}",
                    path=newest.path,
                )
            if self._folder is not None:
                self._folder.unreadable |= unreadable
            for path, error in unreadable.items():
                _log.warning("checkpoint %s is passed over and kept: %s", path.name, error)
            return None if found is None else str(found)

        path = find() if self._ranks is None else on_first(self._ranks, find)
        return None if path is None else Path(path)

    def check(self) -> None:
        """Checks, before anything is started, that the checkpoint to resume from can be read; damage within the tensors
        is found by :meth:`load`."""
        if self._load_path is not None:
            self._load_path = path = self._find(self._load_path)
            if is_torch_file(path) and not self._load_weights_only:
                raise CheckpointError(
                    f"{path} is a torch file, of which only the model's weights can be taken: "
                    "set load_weights_only=True",
                    path=path,
                )
            if self._load_weights_only:
                if not path.exists():
                    raise CheckpointError(
                        f"there is no checkpoint {path}: give the path of a file that was saved", path=path
                    )
            else:
                file = training_file(path)
                self._resumes_at = Timestamp.from_values(read_part(file, "timestamp"))
                self.saved_name = read_part(file, "run").get("name")

    def check_folder(self) -> None:
        """Checks that checkpoints can be written and that no older ones are in the way."""
        if self._folder is not None and self._state.rank == 0:
            _make_writable(self._folder.folder)
        self.check_conflicts(self._resumes_at)

    def load(self, evaluation: Evaluation, sharding: "FullySharded | None" = None) -> None:
        """Restores the training from the checkpoint to load, if there is one, but for its schedulers; ``sharding``
        spreads the model over the ranks."""
        path, state = self._load_path, self._state
        if path is None:
            return
        if self._load_weights_only:
            load_model(state, self._read_weights(path, sharding), path, self._strict)
            return
        tree = self._read(path, sharding)
        load_model(state, tree.get("model", {}), path, self._strict)
        load_training(state, evaluation, tree, path)
        self._schedulers = (tree["schedulers"], path)
        self.sampler_seed, self.microbatch_size = tree.get("sampler_seed"), tree["microbatch_size"]
        orders = tree.get("dataloader")
        # A rank that was not there before has nothing to resume from, and draws numbers of its own.
        if orders and state.rank < len(orders):
            self._loader_resume.load(orders[state.rank])
        if self._folder is not None and self.resumed:
            self._folder.load_state_dict(tree.get("checkpoints") or {})
            self._folder.adopt(path)
        if state.rank == 0:
            self.announce("load", state.timestamp.values, tree.get("run", {}).get("name"))

    @property
    def folder(self) -> Path | None:
        """The folder that checkpoints are written to; ``None`` when none are."""
        return None if self._folder is None else self._folder.folder

    @property
    def facts(self) -> dict[str, str]:
        """The description of the checkpoints in ``run.json``."""
        if self.folder is None:
            return {}
        # The system takes any bytes; UTF-8 does not.
        return {"save_folder": os.fsencode(self.folder.absolute()).decode("utf-8", "backslashreplace")}

    @property
    def resumed_from(self) -> Path | None:
        """The checkpoint of the same run that the training resumes from."""
        return self._load_path if self.resumed else None

    def plan(self, evaluation: Evaluation, data: DataSpec, max_duration: Time) -> TrainingSaver:
        """Returns the saver of a training of that length."""
        if self._saver is None:
            if self._folder is not None and self._state.rank == 0:
                self._folder.check_conflicts(self._state.timestamp)
                self._folder.clean()
            join = partial(_write, None, sharded=self._sharded, ranks=self._ranks)
            # A training does not resume from weights alone.
            announce = _announce_nothing if self._weights_only else self.announce
            self._saver = TrainingSaver(self._state, self._folder, self._interval, join, self._weights_only, announce)
        self._saver.plan(max_duration, partial(self._gather, evaluation, data, self._weights_only))
        return self._saver

    def gatherer(self, evaluation: Evaluation, data: DataSpec) -> Callable[[], dict[str, Any]]:
        """Returns a function that gathers a whole checkpoint of the training."""
        return partial(self._gather, evaluation, data, False)

    def load_schedulers(self) -> None:
        """Restores the schedulers from the checkpoint, once they are made."""
        if self._schedulers is not None:
            saved, path = self._schedulers
            self._schedulers = None
            load_schedulers(self._state, saved, path)

    def check_conflicts(self, timestamp: Timestamp) -> None:
        """Refuses to train from that time on where newer checkpoints are in the folder."""
        if self._folder is not None and self._state.rank == 0:
            self._folder.check_conflicts(timestamp)

    def forget(self) -> None:
        """Forgets the checkpoint of a training that begins anew."""
        self._saver = None
        self.resumed = False

    def write(self, path: Path, evaluation: Evaluation, data: DataSpec | None) -> Path:
        """Writes a checkpoint of its own; all ranks have to call this."""
        tree = self._gather(evaluation, data, self._weights_only)
        if self._state.rank == 0 and not self._weights_only:
            self.announce("save", self._state.timestamp.values)
        _write(path if self._state.rank == 0 else None, tree, sharded=self._sharded, ranks=self._ranks)
        return path

    def _read(self, path: Path, sharding: "FullySharded | None") -> dict[str, Any]:
        if is_sharded(path):
            return read_sharded(path, None if sharding is None else sharding.mesh, self._ranks)
        tree, optimizers = read_checkpoint(path), self._state.optimizers
        if sharding is None:
            return tree
        return sharding.shard_tree(tree, dict(zip(optimizer_names(optimizers), optimizers, strict=True)))

    def _read_weights(self, path: Path, sharding: "FullySharded | None") -> Any:
        if is_sharded(path):
            return read_sharded(path, None if sharding is None else sharding.mesh, self._ranks, part="model")["model"]
        weights = import_torch(path) if is_torch_file(path) else read_weights(path)
        return weights if sharding is None else sharding.shard_tree({"model": weights}, {})["model"]

    def _find(self, path: Path) -> Path:
        if not path.is_dir() or is_sharded(path):
            return path
        names, (filename, latest_filename) = _names(self._state), self._filenames
        kinds = [(filename, latest_filename), (folder_name(filename), latest_filename and folder_name(latest_filename))]
        folders = [CheckpointFolder(path, *kind, overwrite=self._overwrite, names=names) for kind in kinds]
        latest = self._latest(folders)
        if latest is None:
            raise CheckpointError(
                f"there is no checkpoint in {path}: name a file, or the folder that they were saved in", path=path
            )
        return latest


def _announce_nothing(action: str, timestamp: TrainingTime, run: str | None = None) -> None: ...


def _write(path: Path | None, tree: Mapping[str, Any], *, sharded: bool, ranks: Ranks | None) -> None:
    if sharded and ranks is not None:
        write_sharded(path, tree, ranks)
    elif path is not None:
        write_checkpoint(path, tree)


def _gather(
    state: State,
    loader_resume: DataLoaderResume,
    ranks: Ranks | None,
    folder: CheckpointFolder | None,
    evaluation: Evaluation,
    data: DataSpec | None,
    weights_only: bool,
) -> dict[str, Any]:
    if weights_only:
        return weights_tree(state)
    sampler = None if data is None else own_sampler(data.dataloader)
    return {
        **training_tree(state, evaluation),
        "dataloader": None if data is None else _orders(state, loader_resume, ranks, data),
        "sampler_seed": None if sampler is None else sampler.seed,
        "checkpoints": None if folder is None else folder.state_dict(),
    }


def _orders(state: State, loader_resume: DataLoaderResume, ranks: Ranks | None, data: DataSpec) -> list[Any]:
    own = loader_resume.tree(data.dataloader, state.timestamp.values.batch_in_epoch > 0)
    if ranks is None:
        return [own]
    return [msgpack.unpackb(one, strict_map_key=False) for one in ranks.collect(msgpack.packb(own))]


def folder_name(filename: str) -> str:
    """The name of a checkpoint that is one folder for all ranks, from that of one that is a file of a rank."""
    return re.sub(r"[-_.]?(rank)?{rank[^}]*}|\.safetensors$", "", filename)


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

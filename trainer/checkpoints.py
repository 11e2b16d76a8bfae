"""Checkpoints of a trainer: where they are written, and what a training goes on from."""

import os
from pathlib import Path
from typing import Any

import msgpack

from bus.errors import CheckpointError, ConfigurationError
from bus.time import Time
from trainer.checkpoint_file import import_torch, is_torch_file, read_checkpoint, read_weights, write_checkpoint
from trainer.checkpoint_folder import CheckpointFolder
from trainer.checkpointing import CheckpointSaver, NoSaver
from trainer.data import DataSpec
from trainer.epoch_order import EpochOrder
from trainer.evaluation import Evaluation
from trainer.ranks import Ranks
from trainer.state import State
from trainer.training_state import load_model, load_training, training_tree, weights_tree

__all__ = ["Checkpoints"]


class Checkpoints:
    """Loads the checkpoint that a trainer goes on from, and makes what writes new ones; the arguments are those of
    :class:`trainer.Trainer`."""

    def __init__(
        self,
        state: State,
        order: EpochOrder,
        *,
        save_folder: str | os.PathLike[str] | None,
        save_filename: str,
        save_latest_filename: str,
        save_interval: Time,
        keep: int,
        overwrite: bool,
        weights_only: bool,
        load_path: str | os.PathLike[str] | None,
        load_weights_only: bool,
        strict: bool,
        autoresume: bool,
        has_run_name: bool,
        ranks: Ranks | None,
    ) -> None:
        if autoresume and (save_folder is None or not has_run_name):
            missing = "save_folder" if save_folder is None else "run_name"
            raise ConfigurationError(f"autoresume needs a {missing}, to find the run's latest checkpoint: give one")
        if autoresume and weights_only:
            raise ConfigurationError("autoresume cannot go on from weights alone: leave out save_weights_only")
        self._state = state
        self._order = order
        self._ranks = ranks
        self._interval = save_interval
        self._weights_only = weights_only
        self._load_path = None if load_path is None else Path(load_path)
        self._load_weights_only = load_weights_only
        self._strict = strict
        self._saver: CheckpointSaver | None = None
        self._folder: CheckpointFolder | None = None
        self.resumed = False
        """Whether the training goes on from a checkpoint of the same run."""
        if save_folder is not None:
            self._folder = CheckpointFolder(
                save_folder,
                filename=save_filename,
                latest_filename=save_latest_filename,
                keep=keep,
                overwrite=overwrite,
                names=_names(state),
            )
            if autoresume:
                self._resume_latest(self._folder)

    def _resume_latest(self, folder: CheckpointFolder) -> None:
        latest = self._latest(folder)
        if latest is not None:
            self._load_path, self._load_weights_only, self.resumed = latest, False, True

    def _latest(self, folder: CheckpointFolder) -> Path | None:
        """The newest checkpoint in a folder, for which the first rank looks."""
        found = folder.latest() if self._state.rank == 0 else None
        if self._ranks is not None:
            shared = self._ranks.share(None if found is None else str(found))
            found = None if shared is None else Path(shared)
        return found

    def load(self, evaluation: Evaluation, data: DataSpec | None) -> None:
        """Puts the training to where the checkpoint left it, if there is one to load.

        Raises :class:`bus.errors.CheckpointError` when it cannot be read or does not fit."""
        path, state = self._load_path, self._state
        if path is None:
            return
        path = self._find(path)
        if self._load_weights_only:
            weights = import_torch(path) if is_torch_file(path) else read_weights(path)
            load_model(state, weights, path, self._strict)
            return
        if is_torch_file(path):
            raise CheckpointError(
                f"{path} is a torch file, of which only the model's weights can be taken: set load_weights_only=True"
            )
        tree = read_checkpoint(path)
        load_model(state, tree.get("model", {}), path, self._strict)
        load_training(state, evaluation, tree, path)
        orders = tree.get("dataloader")
        # A rank that was not there before has nothing to go on from, and draws numbers of its own.
        if orders and state.rank < len(orders):
            self._order.load(orders[state.rank])
        if self._folder is not None and self.resumed:
            self._folder.load_state_dict(tree.get("checkpoints", {}))
            self._folder.adopt(path)

    def plan(self, evaluation: Evaluation, data: DataSpec, max_duration: Time) -> "CheckpointSaver | NoSaver":
        """What writes checkpoints in a training of that length.

        Raises :class:`bus.errors.ConfigurationError` when older checkpoints are in the way."""
        if self._folder is None:
            return NoSaver()
        if self._saver is None:
            if self._state.rank == 0:
                self._folder.check_conflicts(self._state.timestamp)
                self._folder.clean()
            self._saver = CheckpointSaver(
                self._state, self._folder, self._interval, lambda: self._gather(evaluation, data)
            )
        self._saver.plan(max_duration)
        return self._saver

    def forget(self) -> None:
        """Forgets where the training was, because it begins anew."""
        self._saver = None
        self.resumed = False

    def write(self, path: Path, evaluation: Evaluation, data: DataSpec | None) -> Path:
        """Writes a checkpoint to a file of its own; the first rank does, but all of them have to call this."""
        tree = self._gather(evaluation, data)
        if self._state.rank == 0:
            write_checkpoint(path, tree)
        return path

    def _gather(self, evaluation: Evaluation, data: DataSpec | None) -> dict[str, Any]:
        if self._weights_only:
            return weights_tree(self._state)
        tree = training_tree(self._state, evaluation)
        tree["dataloader"] = None if data is None else self._orders(data)
        if self._folder is not None:
            tree["checkpoints"] = self._folder.state_dict()
        return tree

    def _orders(self, data: DataSpec) -> list[Any]:
        """Where each rank is in its data."""
        own = self._order.tree(data.dataloader, self._state.timestamp.values[7] > 0)
        if self._ranks is None:
            return [own]
        return [msgpack.unpackb(one, strict_map_key=False) for one in self._ranks.collect(msgpack.packb(own))]

    def _find(self, path: Path) -> Path:
        if not path.is_dir():
            return path
        latest = self._latest(CheckpointFolder(path, names=_names(self._state)))
        if latest is None:
            raise CheckpointError(
                f"there is no checkpoint in {path}: name a file, or the folder that they were saved in"
            )
        return latest


def _names(state: State) -> dict[str, Any]:
    return {
        "run_name": state.run_name,
        "rank": state.rank,
        "world_size": state.world_size,
        "local_rank": int(os.environ.get("LOCAL_RANK", 0)),
        "local_world_size": int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
        "node_rank": int(os.environ.get("GROUP_RANK", 0)),
    }

"""The reference's runs with checkpoints, and what is in their folders."""

import json
import os
from pathlib import Path
from typing import Any

from helpers import REFERENCE

RUNS = json.loads((REFERENCE / "cb_checkpoint_saver.json").read_text())["runs"]

PT = {
    "folder": "",
    "filename": "ep{epoch}-ba{batch}-rank{rank}.pt",
    "latest_filename": "latest-rank{rank}.pt",
    "remote_file_name": "{run_name}/checkpoints/ep{epoch}-ba{batch}-rank{rank}.pt",
    "latest_remote_file_name": "{run_name}/checkpoints/latest-rank{rank}.pt",
    "num_checkpoints_to_keep": -1,
}

LONG_NAME = (
    "e{epoch}_b{batch}_be{batch_in_epoch}_s{sample}_se{sample_in_epoch}_t{token}_te{token_in_epoch}_r{rank}"
    "_w{world_size}_lr{local_rank}_lw{local_world_size}_n{node_rank}.pt"
)

SAVERS: dict[str, dict[str, Any]] = {
    "3ba": {"save_interval": "3ba"},
    "int_1": {"save_interval": 1},
    "10sp": {"save_interval": "10sp"},
    "03dur_8ba": {"save_interval": "0.3dur"},
    "keep0": {"save_interval": "1ba", "num_checkpoints_to_keep": 0},
    "keep2": {"save_interval": "1ba", "num_checkpoints_to_keep": 2},
    "names_ok": {
        "save_interval": "3ba", "folder": "{run_name}/ck", "filename": LONG_NAME,
        "latest_filename": "last-{run_name}.pt",
    },
    "names_wct_overwrite_true": {
        "save_interval": "3ba",
        "filename": "b{batch}_{total_wct:.0f}_{epoch_wct:.0f}_{batch_wct:.0f}.pt",
        "overwrite": True,
    },
    "subdir_filename": {"filename": "sub/ep{epoch}.pt", "latest_filename": "links/latest.pt"},
    "same_name_overwritten": {"save_interval": "1ba", "filename": "const.pt", "overwrite": True},
}  # fmt: skip

DURATIONS = {
    "03dur_8ba": "8ba", "keep0": "4ba", "keep2": "4ba", "names_ok": "6ba", "names_wct_overwrite_true": "6ba",
    "conflict": "1ep", "noconflict_other_name": "1ep", "same_name_overwritten": "3ba",
}  # fmt: skip


def listing(folder: Path) -> dict[str, str]:
    """The files below a folder, and where links lead, as the reference lists them."""
    return {
        path.relative_to(folder).as_posix(): f"-> {os.readlink(path)}" if path.is_symlink() else "file"
        for path in folder.rglob("*")
        if path.is_symlink() or not path.is_dir()
    }

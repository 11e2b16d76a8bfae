"""A destination for images that can be read back, in a module that another process imports quickly."""

import json
from pathlib import Path

import numpy as np

from offloop.bus.protocol.snapshot import Snapshot
from offloop.consumers import LoggerDestination
from offloop.consumers.api.logger import Images


class ImageFile(LoggerDestination):
    """Writes a line for the images of a call, as the reference's files have it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def log_images(self, entry: Images, state: Snapshot) -> None:
        images = np.stack(entry.images).transpose(0, 3, 1, 2)
        line = {
            "step": entry.step,
            "event": state.event.name,
            "name": entry.name,
            "use_table": entry.use_table,
            "dtype": str(images.dtype),
            "shape": list(images.shape),
            "sum": float(images.sum(dtype=np.float64)),
            "masks": {
                name: {"shape": [len(masks), *masks[0].shape], "values": np.stack(masks).tolist()}
                for name, masks in entry.masks.items()
            }
            or None,
            "mask_class_labels": entry.mask_class_labels,
        }
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")

"""Training on images with holes in them."""

from offloop.bus.types.event import Event
from offloop.trainer.algorithms.common import check_images, check_key, random_span
from offloop.trainer.arguments.checks import check_count, check_number
from offloop.trainer.device.batch import BatchKey
from offloop.trainer.engine.state import Algorithm, AlgorithmLogger, State


class CutOut(Algorithm):
    """Sets square holes in the images to zero, at random places that are the same for all images of a batch.

    The holes stay in the batch until its end. They are cut off at the border.

    Args:
        num_holes: number of holes; they may overlap.
        length: side of a hole, as a share of the images' shorter side, above 0 and up to 1; rounded down to pixels.
        uniform_sampling: let every pixel be in a hole with the same probability; by default a hole's middle is drawn
            from all pixels, as in the paper.
        input_key: where the images (of shape (rows, channels, height, width)) are in the batch, see
            :mod:`offloop.trainer.device.batch`.

    Paper: DeVries & Taylor 2017, "Improved Regularization of Convolutional Neural Networks with Cutout",
    arXiv:1708.04552. Reference: ``composer/algorithms/cutout``."""

    def __init__(
        self, num_holes: int = 1, length: float = 0.5, uniform_sampling: bool = False, input_key: BatchKey = 0
    ) -> None:
        self.num_holes = check_count(num_holes, "num_holes")
        self.length = check_number(length, "length", above=0, most=1)
        self.uniform_sampling = uniform_sampling
        self.input_key = check_key("input_key", input_key)

    def match(self, event: Event, state: State) -> bool:
        return event is Event.AFTER_DATALOADER

    def apply(self, event: Event, state: State, logger: AlgorithmLogger) -> None:
        images = check_images(state.batch_get_item(self.input_key), "CutOut").clone()
        height, width = images.shape[2:]
        length = int(self.length * min(height, width))
        for _ in range(self.num_holes):
            rows = random_span(height, length, self.uniform_sampling)
            columns = random_span(width, length, self.uniform_sampling)
            images[:, :, rows, columns] = 0
        state.batch_set_item(self.input_key, images)

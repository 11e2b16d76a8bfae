"""Images with their channels side by side in memory."""

import torch

from offloop.bus.types.event import Event
from offloop.trainer.engine.algorithm import Algorithm
from offloop.trainer.engine.engine import AlgorithmLogger
from offloop.trainer.engine.state import State


class ChannelsLast(Algorithm):
    """Lays out the weights of two-dimensional convolutions so that the channels of a pixel are neighbours in memory.

    Convolutions then compute in this layout and hand it on to the layers behind them, which is faster on GPUs with
    tensor cores, above all in 16 bits, and on many CPUs. Shapes and values do not change. Every parameter of four
    dimensions is laid out so.

    Example::

        import torch
        from offloop.trainer import Classifier, Trainer
        from offloop.trainer.algorithms.channels_last import ChannelsLast
        model = Classifier(torch.nn.Sequential(torch.nn.Conv2d(3, 4, 8), torch.nn.Flatten()))
        data, sgd = [(torch.randn(6, 3, 8, 8), torch.randint(4, (6,)))] * 4, torch.optim.SGD(model.parameters(), lr=0.1)
        settings = {"max_duration": "4ba", "publish": False, "progress_bar": False}
        trainer = Trainer(model, data, optimizers=sgd, algorithms=ChannelsLast(), **settings)
        trainer.fit()

    Source: the PyTorch tutorial "Channels Last Memory Format in PyTorch". Reference:
    ``composer/algorithms/channels_last``.
    """

    def match(self, event: Event, state: State) -> bool:
        return event is Event.INIT

    def apply(self, event: Event, state: State, logger: AlgorithmLogger) -> None:
        state.model.to(memory_format=torch.channels_last)

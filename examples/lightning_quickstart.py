"""The autoencoder of Lightning's quick start, published: the marked lines are ours.

    python examples/lightning_quickstart.py             in one terminal
    consumer --callbacks speed,lr,metrics               in another, before it or while it runs; --last: after it
    offloop send NAME stop                          stops it after the current batch; NAME is in its output

Source: https://lightning.ai/docs/pytorch/stable/starter/introduction.html; its handwritten digits are drawn here, to
avoid downloads.
"""

import sys

import lightning as L
import torch
from torch import Tensor, nn, optim, utils

from offloop.lightning import OffloopCallback  # <- this

epochs = int(sys.argv[1]) if len(sys.argv) > 1 else 5

encoder = nn.Sequential(nn.Linear(28 * 28, 64), nn.ReLU(), nn.Linear(64, 3))
decoder = nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 28 * 28))


class LitAutoEncoder(L.LightningModule):
    """Encodes pictures as three numbers, and decodes them."""

    def __init__(self, encoder: nn.Module, decoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.decoder = decoder

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, _ = batch
        x = x.view(x.size(0), -1)
        z = self.encoder(x)
        x_hat = self.decoder(z)
        loss = nn.functional.mse_loss(x_hat, x)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> optim.Optimizer:
        return optim.Adam(self.parameters(), lr=1e-3)


def digits(count: int) -> utils.data.TensorDataset:
    """Draw pictures of shape (1, 28, 28): a pattern for each of ten classes, with noise."""
    patterns = torch.rand(10, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    labels = torch.randint(10, (count,))
    return utils.data.TensorDataset((patterns[labels] + 0.1 * torch.randn(count, 1, 28, 28)).clamp(0, 1), labels)


autoencoder = LitAutoEncoder(encoder, decoder)
train_loader = utils.data.DataLoader(digits(6400), batch_size=16)
trainer = L.Trainer(
    limit_train_batches=100,
    max_epochs=epochs,
    callbacks=[OffloopCallback()],  # <- this
)
trainer.fit(model=autoencoder, train_dataloaders=train_loader)

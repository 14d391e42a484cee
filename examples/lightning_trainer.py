"""Train a small network with the Trainer of Lightning, stop half-way, and resume with the same bits.

Two lines differ from a module without torchzero_clip: `configure_optimizers` returns a `Modular`, and the Trainer gets
`LightningCallback()`, which logs what the chain measured and refuses a Trainer that would clip as well.
"""

import argparse
import logging
import tempfile
import warnings
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from torchzero_clip import AdamW, ClipNorm, ClipNormGrowth, Modular
from torchzero_clip.integrations import LightningCallback

BATCH, BATCHES = 32, 10


class Regression(lightning.LightningModule):
    """Learns a wave from noisy points, of which a few are far off."""

    def __init__(self, epochs: int) -> None:
        super().__init__()
        self.steps = epochs * BATCHES
        self.net = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        """The mean squared error of one batch."""
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        """The chain, and a scheduler of its learning rate."""
        optimizer = Modular(self, ClipNorm(1, dim="global"), ClipNormGrowth(), AdamW(lr=1e-2))
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def points() -> DataLoader[Any]:
    """The same batches in every epoch."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(BATCHES * BATCH, 2, generator=generator) * 2 - 1
    y = torch.sin(3 * x[:, :1]) * x[:, 1:]
    outliers = torch.rand(y.shape, generator=generator) < 0.01
    y = torch.where(outliers, 30 * torch.randn(y.shape, generator=generator), y)
    return DataLoader(TensorDataset(x, y), BATCH)


def train(folder: Path, epochs: int, until: int, resume: Path | None = None) -> tuple[Regression, Any]:
    """The module after ``until`` of ``epochs`` epochs, and its Trainer."""
    lightning.seed_everything(0, verbose=False)
    module = Regression(epochs)
    trainer = lightning.Trainer(
        max_epochs=until,
        callbacks=[LightningCallback()],
        default_root_dir=folder,
        logger=False,  # or a TensorBoardLogger: the metrics of the chain are written there
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
        log_every_n_steps=1,
    )
    trainer.fit(module, points(), ckpt_path=resume)
    return module, trainer


def run(epochs: int) -> tuple[dict[str, float], bool]:
    """The metrics of the last step, and whether a run that was interrupted ends with the same bits."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder, "half.ckpt")
        whole, trainer = train(Path(folder), epochs, epochs)
        _, interrupted = train(Path(folder), epochs, epochs // 2)
        interrupted.save_checkpoint(checkpoint)
        resumed, _ = train(Path(folder), epochs, epochs, checkpoint)
    same = all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))
    return {name: value.item() for name, value in trainer.callback_metrics.items()}, same


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="training steps (default: %(default)s)")
    epochs = max(parser.parse_args().steps // BATCHES, 2)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    found, same = run(epochs)
    print("\nLogged in the last step:")
    for name, value in found.items():
        print(f"{name:>24}  {value:.4f}")
    bits = "the same bits" if same else "DIFFERENT"
    print(f"\nStopped after epoch {epochs // 2} and resumed: the parameters are {bits}.")


if __name__ == "__main__":
    main()

"""Make docs/images/report-light.png, report-dark.png and report-phone.png from a fit, with headless Chromium.

Run: python scripts/pictures/report.py [RUN]
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from PIL import Image
from torch.utils.data import DataLoader, TensorDataset

import hasten as L
from hasten.callbacks import ModelCheckpoint
from hasten.loggers import CSVLogger
from hasten_tools.report import page

TARGET = Path(__file__).resolve().parents[2] / "docs" / "images"
# Name, width and height of the window, dark.
PICTURES = (("report-light", 1180, 1214, False), ("report-dark", 1180, 1214, True), ("report-phone", 390, 1180, False))


class Digits(L.LightningModule):
    """A small convolutional network for 8 x 8 digits."""

    def __init__(self, width: int = 48, lr: float = 0.003) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Sequential(
            torch.nn.Conv2d(1, width, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(width, width, 3, stride=2),
            torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.LazyLinear(10),
        )  # fmt: skip
        self.net(torch.zeros(1, 1, 8, 8))

    def _loss(self, batch: tuple[torch.Tensor, torch.Tensor], stage: str) -> torch.Tensor:
        images, labels = batch
        logits = self.net(images)
        loss = torch.nn.functional.cross_entropy(logits, labels)
        self.log_dict({f"{stage}_loss": loss, f"{stage}_acc": (logits.argmax(1) == labels).float().mean()})
        return loss

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Train on a batch."""
        return self._loss(batch, "train")

    def validation_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> None:
        """Validate on a batch."""
        self._loss(batch, "val")

    def configure_optimizers(self) -> dict[str, object]:
        """Return AdamW, whose rate falls along a cosine."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.hparams["lr"], total_steps=90 * 12)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def train(folder: str) -> Path:
    """Train on scikit-learn's digits; return the folder of the run."""
    from sklearn.datasets import load_digits

    L.seed_everything(0)
    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 16
    # Some noise, so that there is something to generalize over.
    images += 0.35 * torch.randn_like(images)
    data = torch.utils.data.random_split(TensorDataset(images, torch.tensor(found.target)), [1440, 357])
    logger = CSVLogger(folder, name="digits", version="convolution")
    trainer = L.Trainer(
        max_epochs=12, accelerator="cpu", logger=logger, log_every_n_steps=5, gradient_clip_val=1.0,
        callbacks=[ModelCheckpoint(monitor="val_loss", save_top_k=3)], enable_progress_bar=False,
    )  # fmt: skip
    trainer.fit(Digits(), DataLoader(data[0], batch_size=16, shuffle=True), DataLoader(data[1], batch_size=128))
    return Path(folder, "digits", "convolution")


def main() -> None:
    """Make the pictures."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(sys.argv[1]) if len(sys.argv) > 1 else None
        if run is None:
            # Relative, and so is the path that the page shows.
            os.chdir(folder)
            run = train("logs")
        html = Path(folder, "report.html")
        page.write([run], html)
        for name, width, height, dark in PICTURES:
            shoot(html, name, width, height, dark=dark)


def shoot(html: Path, name: str, width: int, height: int, *, dark: bool) -> None:
    """Take a picture; the phone's page is in a frame, because a window is at least 500 wide."""
    browser = shutil.which("chromium") or shutil.which("google-chrome") or "chromium"
    theme = "dark" if dark else "light"
    shown = html.with_name("shown.html")
    shown.write_text(html.read_text().replace('<html lang="en">', f'<html lang="en" data-theme="{theme}">', 1))
    frame = html.with_name("frame.html")
    frame.write_text(
        f'<body style="margin:0"><iframe src="shown.html" style="width:{width}px;height:{height}px;border:0"></iframe>'
    )
    picture = html.with_name("picture.png")
    with tempfile.TemporaryDirectory() as profile:
        subprocess.run(
            [browser, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars",
             "--disable-background-networking", "--disable-component-update", "--disable-sync",
             "--force-device-scale-factor=2" if width < 500 else "--force-device-scale-factor=1.25",
             "--virtual-time-budget=8000", f"--user-data-dir={profile}", f"--screenshot={picture}",
             f"--window-size={max(500, width)},{height}", frame.as_uri()],
            check=True, capture_output=True, timeout=180,
        )  # fmt: skip
    image = Image.open(picture).convert("RGB")
    scale = image.width / max(500, width)
    image = image.crop((0, 0, round(width * scale), round(height * scale)))
    image.quantize(255, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(
        TARGET / f"{name}.png", optimize=True
    )
    print(TARGET / f"{name}.png", f"{(TARGET / f'{name}.png').stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()

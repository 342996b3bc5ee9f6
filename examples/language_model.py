"""A small transformer language model on a stream of characters: an IterableDataset that ends when you say so."""

import argparse
import inspect

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import hasten as L

TEXT = inspect.getsource(argparse)  # 100,000 characters that every Python has
CHARACTERS = sorted(set(TEXT))


class Blocks(IterableDataset):
    """Endless blocks of characters and the character after each, from places drawn at random."""

    def __init__(self, block: int = 64, seed: int = 0) -> None:
        self.block, self.seed = block, seed
        self.data = torch.tensor([CHARACTERS.index(character) for character in TEXT])

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed)
        while True:
            start = int(torch.randint(len(self.data) - self.block - 1, (), generator=generator))
            yield self.data[start : start + self.block], self.data[start + 1 : start + self.block + 1]


class LanguageModel(L.LightningModule):
    def __init__(self, width: int = 64, block: int = 64, lr: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.words, self.places = nn.Embedding(len(CHARACTERS), width), nn.Embedding(block, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.head = nn.Linear(width, len(CHARACTERS))

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        time = characters.size(1)
        x = self.words(characters) + self.places(torch.arange(time, device=characters.device))
        mask = nn.Transformer.generate_square_subsequent_mask(time, device=characters.device)
        return self.head(self.layers(x, mask=mask, is_causal=True))

    def training_step(self, batch, batch_idx):
        characters, following = batch
        loss = nn.functional.cross_entropy(self(characters).flatten(0, 1), following.flatten())
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.hparams.lr, self.trainer.max_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


if __name__ == "__main__":
    L.seed_everything(0, verbose=False)
    trainer = L.Trainer(max_steps=150, accelerator="cpu", gradient_clip_val=1.0, log_every_n_steps=10)
    trainer.fit(LanguageModel(), DataLoader(Blocks(), batch_size=16))
    loss = trainer.callback_metrics["loss"].item()
    print(f"result: loss {loss:.2f} after {trainer.global_step} steps; guessing has {len(CHARACTERS)} choices")

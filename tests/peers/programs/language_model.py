"""A character-level transformer on a stream of text."""

import math
import sys
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import Callback, EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchmetrics.text import Perplexity

sys.path.insert(0, str(Path(__file__).parents[1]))
import record

ALPHABET = "abcdefghijklmnopqrstuvwxyz .,\n"


def write_text(seed: int, characters: int) -> torch.Tensor:
    """Random text with a simple grammar, as indices into ALPHABET: (characters,)."""
    generator = torch.Generator().manual_seed(seed)
    words = ["the", "a", "fox", "dog", "sees", "eats", "runs", "slowly", "old", "red", "and", "while"]
    text, word = "", 0
    for draw in torch.randint(27, (characters,), generator=generator).tolist():
        word = (3 * word + 1 + draw % 3) % len(words)
        text += words[word] + (" " if draw > 2 else ". ")
    return torch.tensor([ALPHABET.index(character) for character in text[:characters]])


class TextStream(IterableDataset):
    """Windows of a text, drawn at random; how many there are is only known to who reads them all."""

    def __init__(self, text: torch.Tensor, context: int, windows: int):
        self.text, self.context, self.windows = text, context, windows

    def __iter__(self):
        generator = torch.Generator().manual_seed(0)
        for _ in range(self.windows):
            start = int(torch.randint(len(self.text) - self.context - 1, (), generator=generator))
            window = self.text[start : start + self.context + 1]
            yield {"tokens": window[:-1], "targets": window[1:]}


class Windows(Dataset):
    """All windows of a text, side by side."""

    def __init__(self, text: torch.Tensor, context: int):
        self.text, self.context = text, context

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        window = self.text[index * self.context : (index + 1) * self.context + 1]
        return {"tokens": window[:-1], "targets": window[1:]}


@record.hooks
class TextData(L.LightningDataModule):
    """A stream to train on, two texts to validate on, one to test on, beginnings to continue."""

    def __init__(self, context: int = 32, batch_size: int = 8, windows: int = 320):
        super().__init__()
        self.save_hyperparameters(ignore=["windows"])
        self.windows = windows

    def train_dataloader(self):
        stream = TextStream(write_text(0, 6000), self.hparams.context, self.windows)
        return DataLoader(stream, batch_size=self.hparams.batch_size)

    def val_dataloader(self):
        context, batch_size = self.hparams.context, self.hparams.batch_size
        texts = write_text(0, 1500), write_text(1, 1000)
        return [DataLoader(Windows(text, context), batch_size=batch_size) for text in texts]

    def test_dataloader(self):
        windows = Windows(write_text(2, 1500), self.hparams.context)
        return DataLoader(windows, batch_size=self.hparams.batch_size)

    def predict_dataloader(self):
        return DataLoader(write_text(3, 80).view(10, 8), batch_size=4)


@record.hooks
class LanguageModel(L.LightningModule):
    """Predict the next character."""

    def __init__(self, context=32, width=32, heads=4, layers=2, lr=5e-3, warmup=8, weight_decay=0.1):
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.Embedding(len(ALPHABET), width)
        self.position = nn.Parameter(0.02 * torch.randn(context, width))
        layer = nn.TransformerEncoderLayer(
            width, heads, 2 * width, dropout=0.0, batch_first=True, norm_first=True, activation="gelu"
        )
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, len(ALPHABET), bias=False)
        self.head.weight = self.embed.weight
        self.perplexities = nn.ModuleList([Perplexity(), Perplexity()])
        self.example_input_array = torch.zeros(1, 8, dtype=torch.long)
        self.tokens_seen = 0

    def forward(self, tokens):
        """Logits: (batch, time, characters)."""
        time = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(time)
        x = self.embed(tokens) + self.position[:time]
        return self.head(self.norm(self.blocks(x, mask=mask, is_causal=True)))

    def loss(self, batch):
        logits = self(batch["tokens"])
        return logits, F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())

    def training_step(self, batch, batch_idx):
        _, loss = self.loss(batch)
        self.tokens_seen += batch["tokens"].numel()
        self.log("loss", loss, prog_bar=True, batch_size=len(batch["tokens"]))
        self.log("tokens", float(self.tokens_seen), on_step=True, batch_size=1)
        return {"loss": loss}

    def on_before_optimizer_step(self, optimizer):
        norms = L.pytorch.utilities.grad_norm(self.norm, norm_type=2)
        self.log("grad_norm", norms["grad_2.0_norm_total"])

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        logits, loss = self.loss(batch)
        self.log("val_loss", loss, batch_size=len(batch["tokens"]))
        self.perplexities[dataloader_idx](logits, batch["targets"])
        self.log("perplexity", self.perplexities[dataloader_idx])

    def test_step(self, batch, batch_idx):
        _, loss = self.loss(batch)
        self.log_dict({"test_loss": loss, "test_bits": loss / math.log(2)}, batch_size=len(batch["tokens"]))

    def predict_step(self, batch, batch_idx):
        for _ in range(6):
            tokens = batch[:, -self.hparams.context :]
            batch = torch.cat([batch, self(tokens)[:, -1:].argmax(-1)], 1)
        return ["".join(ALPHABET[index] for index in row) for row in batch.tolist()]

    def configure_optimizers(self):
        decayed = [p for p in self.parameters() if p.dim() > 1]
        others = [p for p in self.parameters() if p.dim() <= 1]
        groups = [
            {"params": decayed, "weight_decay": self.hparams.weight_decay, "name": "decayed"},
            {"params": others, "weight_decay": 0.0, "name": "others"},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.hparams.lr, betas=(0.9, 0.95))
        total = self.trainer.estimated_stepping_batches
        record.note("estimated_stepping_batches", total)

        def factor(step):
            if step < self.hparams.warmup:
                return (step + 1) / self.hparams.warmup
            return 0.5 * (1 + math.cos(math.pi * min(1.0, step / 60)))

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint):
        checkpoint["tokens_seen"] = self.tokens_seen

    def on_load_checkpoint(self, checkpoint):
        self.tokens_seen = checkpoint["tokens_seen"]


@record.hooks
class Sample(Callback):
    """Write some text after each validation."""

    def __init__(self):
        self.texts = []

    def on_validation_end(self, trainer, pl_module):
        if trainer.sanity_checking:
            return
        start = torch.tensor([[ALPHABET.index("t")]])
        self.texts.append(pl_module.predict_step(start, 0)[0])


def make_trainer(steps, sample):
    """The Trainer of a run of so many optimizer steps."""
    return Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        max_epochs=-1,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        val_check_interval=20,
        check_val_every_n_epoch=None,
        log_every_n_steps=4,
        num_sanity_val_steps=1,
        callbacks=[
            sample,
            ModelCheckpoint(
                dirpath="checkpoints",
                filename="lm-{step:03d}-{val_loss/dataloader_idx_1:.2f}",
                monitor="val_loss/dataloader_idx_1",
                auto_insert_metric_name=False,
                save_top_k=2,
                save_last=True,
            ),
            EarlyStopping("val_loss/dataloader_idx_1", patience=3, min_delta=1e-4),
            LearningRateMonitor(logging_interval="step", log_weight_decay=True),
        ],
        logger=[TensorBoardLogger(".", "tb", 0), CSVLogger(".", "csv", 0), record.RecordLogger()],
        enable_progress_bar=False,
    )


def main():
    """Train, test the best model, go on from the last one, continue some texts."""
    torch.set_num_threads(1)
    seed_everything(5)
    sample = Sample()
    model, trainer = LanguageModel(), make_trainer(40, sample)
    trainer.fit(model, datamodule=TextData())
    record.trainer("fit", trainer, model)
    record.note("test", trainer.test(model, datamodule=TextData(), ckpt_path="best", verbose=False))
    record.note("validate", trainer.validate(model, datamodule=TextData(), verbose=False))
    record.trainer("tested", trainer, model)
    record.checkpoints("checkpoints", ".")

    model, trainer = LanguageModel(), make_trainer(60, sample)
    last = Path("checkpoints") / "last.ckpt"
    trainer.fit(model, datamodule=TextData(), ckpt_path=last)
    record.trainer("resumed", trainer, model)
    record.note("predictions", trainer.predict(model, datamodule=TextData()))
    record.note("texts", sample.texts)
    record.checkpoints("all checkpoints", ".")


if __name__ == "__main__":
    main()

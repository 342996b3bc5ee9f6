"""`hasten migrate`: the imports of programs rewritten, and nothing else."""

from __future__ import annotations

import io
import os
import re
import stat
import sys
import textwrap
from pathlib import Path

import pytest
from tests.refusals import refused

from hasten.commands import main
from hasten_lightning import rewrite


def migrated(source: str) -> str:
    return rewrite.python(textwrap.dedent(source).encode()).data.decode()


def by_hand(source: str) -> list[tuple[int, str]]:
    return rewrite.python(textwrap.dedent(source).encode()).by_hand


def table(text: str, *separators: str) -> list[list[str]]:
    """Return the cells of each line; ``\\n`` stands for a line break."""
    lines = [line.replace("\\n", "\n") for line in text.strip("\n").split("\n")]
    return [re.split("|".join(map(re.escape, separators)), line) for line in lines]


IMPORTS = r"""
import lightning as L => import hasten as L
import lightning.pytorch as pl => import hasten as pl
import pytorch_lightning as pl => import hasten as pl
import lightning => import hasten
import lightning.pytorch => import hasten
import os, pytorch_lightning as pl, sys => import os, hasten as pl, sys
import lightning, lightning.pytorch => import hasten
import os, lightning, pytorch_lightning => import os, hasten
import lightning.pytorch.callbacks as cb => import hasten.callbacks as cb
import lightning.pytorch.trainer.states as st => import hasten.utilities as st
from lightning import Trainer, Fabric => from hasten import Trainer, Fabric
from lightning.fabric import Fabric => from hasten import Fabric
from pytorch_lightning.callbacks import Timer as T => from hasten.callbacks import Timer as T
from lightning.pytorch.callbacks.early_stopping import EarlyStopping => from hasten.callbacks import EarlyStopping
from lightning.pytorch.loggers.wandb import WandbLogger => from hasten.loggers import WandbLogger
from lightning.pytorch.callbacks.timer import Interval => from hasten.callbacks.timer import Interval
from lightning.pytorch.strategies.ddp import DDPStrategy => from hasten.strategies import DDPStrategy
from lightning.pytorch.utilities.types import STEP_OUTPUT => from hasten.utilities import STEP_OUTPUT
from lightning.pytorch.core.optimizer import LightningOptimizer => from hasten.utilities import LightningOptimizer
from lightning.fabric.utilities.cloud_io import _load => from hasten.utilities.saving import read as _load
from lightning.fabric.utilities.cloud_io import _load as load => from hasten.utilities.saving import read as load
from lightning.fabric.utilities.cloud_io import _load as read => from hasten.utilities.saving import read
from lightning import pytorch as pl => import hasten as pl
from lightning.pytorch import callbacks => from hasten import callbacks
from lightning.pytorch import callbacks as cb => from hasten import callbacks as cb
from lightning.pytorch import * => from hasten import *
from lightning.pytorch.callbacks import * => from hasten.callbacks import *
from lightning.pytorch import (  # all\n    Trainer,\n) => from hasten import (  # all\n    Trainer,\n)
from .lightning import x => from .lightning import x
import lightning_utilities, lightningcss => import lightning_utilities, lightningcss
import bolts.lightning as lightning; lightning.x => import bolts.lightning as lightning; lightning.x
"""


LONG_IMPORTS = [
    [
        "from lightning.pytorch.callbacks.timer import Interval, Timer  # both",
        "from hasten.callbacks import Timer\nfrom hasten.callbacks.timer import Interval  # both",
    ],
    [
        "if True: from lightning.pytorch.callbacks.timer import Interval, Timer; x = 1",
        "if True: from hasten.callbacks import Timer; from hasten.callbacks.timer import Interval; x = 1",
    ],
    [
        "try:\n  import lightning as L\nexcept ImportError:\n  L = None",
        "try:\n  import hasten as L\nexcept ImportError:\n  L = None",
    ],
]


@pytest.mark.parametrize(("old", "new"), [*table(IMPORTS, " => "), *LONG_IMPORTS])
def test_imports(old: str, new: str) -> None:
    assert migrated(old + "\n") == new + "\n"
    assert by_hand(old + "\n") == []
    assert migrated(new + "\n") == new + "\n"  # Again: nothing happens.


SHADOWED = ["import lightning", *["def f(lightning):\n    return lightning.pytorch.Trainer"] * 2]
# The line before, a use, and what becomes of it.
USES = r"""
import lightning as L | L.pytorch.callbacks.Timer( 1 ) => L.callbacks.Timer( 1 )
import lightning as L | L.Trainer.fit => L.Trainer.fit
import lightning as L | L.fabric.Fabric => L.Fabric
import lightning.pytorch as pl | pl.callbacks.Timer => pl.callbacks.Timer
import lightning.pytorch as pl | pl.callbacks.timer.Timer => pl.callbacks.Timer
import lightning.pytorch as pl | x = pl.callbacks => x = pl.callbacks
import lightning.pytorch as pl | (pl.utilities.rank_zero.rank_zero_only) => (pl.utilities.rank_zero_only)
import lightning.pytorch | lightning.pytorch.Trainer() => hasten.Trainer()
import lightning.pytorch | x = lightning.pytorch => x = hasten
import pytorch_lightning | pytorch_lightning.loggers.CSVLogger => hasten.loggers.CSVLogger
import pytorch_lightning | f(pytorch_lightning) => f(hasten)
import lightning.pytorch.callbacks as cb | cb.Timer => cb.Timer
from lightning import pytorch as pl | pl.Trainer => pl.Trainer
import lightning | x.lightning.pytorch.Trainer => x.lightning.pytorch.Trainer
 | lightning.pytorch.Trainer => lightning.pytorch.Trainer
 | 'lightning.pytorch.callbacks.ModelCheckpoint' => 'hasten.callbacks.ModelCheckpoint'
 | r"pytorch_lightning.Trainer.fit" => r"hasten.Trainer.fit"
 | "lightning.pytorch" => "hasten"
 | b"lightning.pytorch.Trainer" => b"lightning.pytorch.Trainer"
 | "my.lightning.pytorch.Trainer" => "my.lightning.pytorch.Trainer"
"""


@pytest.mark.parametrize(("header", "old", "new"), [*table(USES, " | ", " => "), SHADOWED])
def test_uses(header: str, old: str, new: str) -> None:
    assert migrated(f"{header}\n{old}\n").partition("\n")[2] == f"{new}\n"
    assert by_hand(f"{header}\n{old}\n") == []


# The source, the number of the line, and the message.
BY_HAND = r"""
x = 1\nimport lightning.pytorch.metrics\n | 2 | lightning.pytorch.metrics: Use the package torchmetrics
import lightning.app as app\n | 1 | lightning.app: It belongs to a hosted product.
\nfrom lightning.pytorch.metrics import Accuracy\n | 2 | lightning.pytorch.metrics: Use
from lightning.pytorch import Missing\n | 1 | lightning.pytorch.Missing: hasten does not have this name.
from lightning.fabric.utilities.spike import SpikeDetection\n | 1 | lightning.fabric.utilities.spike.SpikeDetection:
import lightning.pytorch.loops as loops\n | 1 | lightning.pytorch.loops: its names are in several modules
from pytorch_lightning import loops\n | 1 | pytorch_lightning.loops: its names are in several modules
import lightning as L\nL.__version__\n | 2 | L.__version__: hasten.__version__ counts from
from lightning.pytorch.loops import *\n | 1 | from lightning.pytorch.loops import *: import the names
import pytorch_lightning as pl\n\npl.loops.loop\n | 3 | pl.loops.loop: hasten has no loop objects
import lightning as L\nL.pytorch.loops._FitLoop\n | 2 | L.pytorch.loops._FitLoop: It is hasten_lightning.loo
x = 'see lightning.pytorch.Trainer there'\n | 1 | a text names lightning.pytorch.Trainer
x = 'lightning.pytorch.Missing'\n | 1 | a text names lightning.pytorch.Missing
"""


@pytest.mark.parametrize(("source", "line", "message"), table(BY_HAND, " | "))
def test_what_needs_a_hand_is_listed_and_left(source: str, line: str, message: str) -> None:
    ((found, text),) = by_hand(source)
    assert found == int(line)
    assert text.startswith(message)
    assert source.splitlines()[found - 1] in migrated(source).splitlines()


def test_a_class_that_cannot_be_made_yet_is_rewritten_and_listed() -> None:
    source = "from lightning.fabric.strategies import DataParallelStrategy\n"
    assert migrated(source) == "from hasten.strategies import DataParallelStrategy\n"
    assert by_hand(source) == [(1, "DataParallelStrategy can be imported, but not made, in this version of hasten.")]
    assert by_hand("import lightning as L\nL.fabric.strategies.DataParallelStrategy\n")[0][0] == 2


def test_a_command_line_is_rewritten_where_jsonargparse_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [name for name in sys.modules if name.partition(".")[0] == "jsonargparse" or "hasten.cli" in name]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "jsonargparse", None)
    source = "from lightning.pytorch.cli import LightningCLI, SaveConfigCallback\n"
    assert migrated(source) == "from hasten.cli import LightningCLI, SaveConfigCallback\n"


def test_a_statement_of_which_a_part_can_be_rewritten() -> None:
    source = "# why\nfrom lightning.pytorch import Trainer, Missing  # end\n"
    assert migrated(source) == "# why\nfrom hasten import Trainer\nfrom lightning.pytorch import Missing  # end\n"
    assert [line for line, _ in by_hand(source)] == [2]


def test_bytes_that_have_nothing_to_do_with_it_stay() -> None:
    source = (
        "# -*- coding: latin-1 -*-\r\nimport  lightning  as  L   # caf\xe9\r\n\r\na = {  'a':1 }\r\nx=L . Trainer\r\n"
    )
    data = source.encode("latin-1")
    assert rewrite.python(data).data == data.replace(b"lightning", b"hasten")
    untouched = b"import  os\n\tbroken ( python"
    assert rewrite.python(untouched) == rewrite.Rewritten(untouched)


def test_what_cannot_be_read_is_told() -> None:
    with refused(ValueError, says="line 2"):
        rewrite.python(b"import lightning\ndef (\n")


def test_yaml_class_paths() -> None:
    old = (
        b"# lightning.pytorch is mentioned\ntrainer:   # x\n"
        b"  logger: {class_path: lightning.pytorch.loggers.CSVLogger}\n"
        b"  callbacks:\r\n    - class_path: pytorch_lightning.callbacks.Missing\n  dir: my-lightning.pytorch/x\n"
    )
    result = rewrite.yaml(old)
    assert result.data == old.replace(b"lightning.pytorch.loggers", b"hasten.loggers").replace(
        b"# lightning.pytorch is", b"# hasten is"
    )
    assert result.by_hand == [(5, "pytorch_lightning.callbacks.Missing: hasten does not have this name.")]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.py").write_text("import lightning as L\n")
    (tmp_path / "sub" / "b.py").write_text("import pytorch_lightning as pl\nimport lightning.pytorch.metrics\n")
    (tmp_path / "sub" / "other.py").write_text("import os\n")
    (tmp_path / "c.yaml").write_text("class_path: lightning.pytorch.Trainer\n")
    (tmp_path / "requirements.txt").write_text("torch\nlightning>=2.0  # x\nlightning-utilities\n# lightning\n")
    (tmp_path / "n.ipynb").write_text('{"cells": ["import lightning"]}')
    for ignored in (".git", "__pycache__", "myenv/lib"):
        (tmp_path / ignored).mkdir(parents=True)
        (tmp_path / ignored / "x.py").write_text("import lightning\n")
    (tmp_path / "myenv" / "pyvenv.cfg").write_text("")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_dry_run_shows_the_change_and_the_list_and_writes_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(folder)
    assert main(["migrate", ".", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert contents(folder) == before
    assert "--- a.py\n+++ a.py\n@@ -1 +1 @@\n-import lightning as L\n+import hasten as L\n" in shown
    assert "+import hasten as pl" in shown
    assert "+class_path: hasten.Trainer" in shown
    assert "by hand  sub/b.py:2  lightning.pytorch.metrics: Use the package torchmetrics" in shown
    assert "by hand  n.ipynb:1  a notebook" in shown
    assert "by hand  requirements.txt:2  add hasten to what is installed" in shown
    assert shown.count("by hand  requirements.txt") == 1
    assert shown.endswith("3 file(s) would be rewritten.\n")
    assert "x.py" not in shown
    assert "other.py" not in shown


@pytest.mark.parametrize(("answer", "written"), [("y\n", True), ("Yes\n", True), ("n\n", False), ("", False)])
def test_it_asks_first(
    folder: Path, answer: str, written: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(folder)
    monkeypatch.setattr("sys.stdin", io.StringIO(answer))
    assert main(["migrate", str(folder)]) == (0 if written else 1)
    shown = capsys.readouterr()
    assert "Rewrite 3 file(s)? [y/N] " in shown.out
    assert (contents(folder) != before) == written
    assert ("3 file(s) rewritten." in shown.out) == written
    assert ("Nothing was written." in shown.err) != written


def test_yes_rewrites_and_a_second_time_there_is_nothing_left(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.chmod("a.py", 0o750)
    Path("link.py").symlink_to("a.py")
    assert main(["migrate", ".", "--yes"]) == 0
    assert Path("a.py").read_text() == "import hasten as L\n"
    assert stat.S_IMODE(Path("a.py").stat().st_mode) == 0o750
    assert Path("link.py").is_symlink()
    assert Path("sub/b.py").read_text() == "import hasten as pl\nimport lightning.pytorch.metrics\n"
    assert Path("c.yaml").read_text() == "class_path: hasten.Trainer\n"
    assert not [name for name in os.listdir() if name.startswith(".hasten")]
    after = contents(folder)
    capsys.readouterr()
    assert main(["migrate", ".", "--yes"]) == 0
    assert capsys.readouterr().out.endswith("Nothing else to rewrite.\n")
    assert contents(folder) == after
    assert main(["migrate", "sub/other.py"]) == 0
    assert capsys.readouterr().out == "Nothing to rewrite.\n"


def test_a_write_that_fails_leaves_the_file_whole(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    replace = os.replace

    def fail_for_b(source: str, target: str) -> None:
        if str(target).endswith("b.py"):
            raise PermissionError(13, "Permission denied")
        replace(source, target)

    monkeypatch.setattr(os, "replace", fail_for_b)
    assert main(["migrate", ".", "--yes"]) == 1
    assert "sub/b.py: Permission denied. 2 of 3 file(s) were rewritten" in capsys.readouterr().err
    assert Path("sub/b.py").read_text() == "import pytorch_lightning as pl\nimport lightning.pytorch.metrics\n"
    assert sorted(os.listdir("sub")) == ["b.py", "other.py"]


def test_a_file_changed_meanwhile_is_left(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def agree(question: str) -> str:
        Path("a.py").write_text("import lightning as L, os\n")
        return "y"

    monkeypatch.setattr("builtins.input", agree)
    assert main(["migrate", "."]) == 1
    assert "a.py: it was changed meanwhile. 0 of 3 file(s) were rewritten" in capsys.readouterr().err
    assert Path("a.py").read_text() == "import lightning as L, os\n"


def test_without_libcst_the_line_that_installs_it_is_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "libcst", None)
    assert main(["migrate", "."]) == 1
    assert "hasten migrate needs the package libcst" in capsys.readouterr().err

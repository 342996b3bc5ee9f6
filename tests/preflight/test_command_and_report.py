"""What ``hasten check`` does with programs, how reports look, and what a check says that it could not look at."""

from __future__ import annotations

import json
import pickle
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import hasten as L
import hasten_lightning
from hasten.fabric import Fabric
from hasten.machine import launch
from hasten_lightning.commands import run
from hasten_tools.commands import check as command
from hasten_tools.preflight import CheckFailed, CheckReport, CheckRow, loaders
from tests.models import Classifier, Several, dataset, loader, quiet
from tests.refusals import refused

ROWS = [
    CheckRow("device", "ok", "cpu"),
    CheckRow("loss", "warning", "odd <b>", "f(x)"),
    CheckRow("training_step", "error", "It fails. " * 20, "line 1\nline 2", "train.py:3"),
]


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take back what a command changes for the rest of its process."""
    for owner, names in (
        (L.Trainer, ("fit", "validate", "test", "predict")),
        (Fabric, ("launch", "setup", "setup_module")),
    ):
        for name in names:
            monkeypatch.setattr(owner, name, getattr(owner, name))


def two_processes() -> Fabric:
    return Fabric(accelerator="cpu", devices=2, strategy="ddp")


def checked(run: Callable[[], object]) -> CheckReport:
    def run_it() -> int:
        run()
        return 0

    return command.check_program(run_it, shown="train.py")


# -- the command


@pytest.mark.usefixtures("patched")
def test_a_program_is_checked_at_its_first_fit() -> None:
    seen: list[Any] = []

    def program() -> None:
        # Before that it may evaluate: one batch is.
        model = Classifier()
        seen.append(quiet().validate(model, loader(), verbose=False))
        seen.append(len(quiet().predict(model, loader()) or []))
        quiet().fit(model, loader(shuffle=True), loader(), ckpt_path="gone.ckpt")
        seen.append("after fit")

    report = checked(program)
    assert report.title.startswith("Check of Classifier on cpu")
    assert [row.seen for row in report.errors] == ["fit(ckpt_path='gone.ckpt'): there is no such file."]
    assert seen[0][0].keys() == {"val_loss"}
    assert seen[1:] == [1]


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize(("package", "status"), [("hasten", "error"), ("lightning", "warning")])
def test_a_mistake_is_an_error_where_python_makes_it_one(
    package: str, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text(
        f"from {package} import Trainer\n"
        "from hasten.demos import BoringModel\n"
        "Trainer(logger=False, enable_checkpointing=False).fit(BoringModel(), [])\n"
    )
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(launch, "PREFIX", [])
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    try:
        report = checked(lambda: run.main([str(tmp_path / "train.py")], as_python_does=True))
    finally:
        hasten_lightning.uninstall()
    assert status in {row.status for row in report.rows if "the train dataloader has no batches" in row.seen}


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize(
    ("program", "status", "said"),
    [
        (lambda: None, "error", "ended with code 0 and did not call Trainer.fit"),
        (lambda: sys.exit(3), "error", "ended with code 3 and did not call Trainer.fit"),
        (lambda: sys.exit("no data here"), "error", "no data here"),
        (lambda: quiet().validate(Classifier(), loader(), verbose=False), "not checked", "never Trainer.fit"),
        (lambda: Fabric(accelerator="cpu").setup(nn.Linear(1, 1)), "not checked", "keeps its own loop (Fabric)"),
        (lambda: two_processes().launch(), "not checked", "keeps its own loop (Fabric)"),
        (lambda: two_processes().launch(print), "not checked", "keeps its own loop (Fabric)"),
        (lambda: sys.excepthook(KeyError, KeyError("x"), None), "error", "before Trainer.fit: KeyError: 'x'"),
    ],
)
def test_a_program_that_does_not_fit_says_why(program: Callable[[], object], status: str, said: str) -> None:
    (row,) = checked(program).rows
    assert row.status == status
    assert said in row.seen


def test_rows_are_written_as_json_and_errors_give_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text("")
    target = tmp_path / "check.json"
    words = ["--json", str(target), str(tmp_path / "train.py"), "--lr", "1"]
    for rows, code in ((ROWS, 1), (ROWS[:2], 0)):
        monkeypatch.setattr(command, "check_program", lambda run, shown, rows=rows: CheckReport(list(rows), shown))
        assert command.main(words) == code
    assert capsys.readouterr().out.startswith(str(tmp_path / "train.py"))
    content = json.loads(target.read_text())
    assert content["ok"] is True
    assert content["rows"][1]["line"] == "f(x)"
    assert command.main(["--json", str(tmp_path), str(tmp_path / "train.py")]) == 1
    assert "hasten check: " in capsys.readouterr().err


# -- the report


def test_reports_as_text_color_and_html() -> None:
    report = CheckReport(ROWS, "Check of Net")
    text = str(report)
    assert text.splitlines()[-1] == report.summary == "1 error, 1 warning, 1 ok"
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 100
    assert "at train.py:3" in text
    assert "-> line 1" in text
    assert not report.ok
    assert "odd &lt;b&gt;" in report._repr_html_()
    assert pickle.loads(pickle.dumps(report)).rows == report.rows
    with refused(CheckFailed, says=("1 error", "training_step", "py:3")):
        report.raise_if_failed()
    CheckReport(ROWS[:2]).raise_if_failed()
    pytest.importorskip("rich")
    from rich.console import Console

    console = Console(record=True, force_terminal=True, width=118, highlight=False)
    with console.capture() as shown:
        console.print(report)
    assert "\x1b[1;31merror" in shown.get()


def test_a_pipe_gets_no_colors(capsys: pytest.CaptureFixture[str]) -> None:
    CheckReport(ROWS).show()
    assert "\x1b" not in capsys.readouterr().out


# -- what a check does not look at


class Lazy(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.LazyLinear(2))


class Once(IterableDataset[Any]):
    def __init__(self) -> None:
        self.samples = iter([dataset(1)[0]] * 16)

    def __iter__(self) -> Iterator[Any]:
        return self.samples


class Skips(Classifier):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int:
        return -1


def batches() -> Iterator[Any]:
    yield from [(torch.randn(4, 8), torch.zeros(4, dtype=torch.int64))] * 4


@pytest.mark.parametrize(
    ("make", "name", "why"),
    [
        (lambda: quiet(strategy="ddp", devices=2).check(Classifier(), loader()), "processes", "one of them"),
        (lambda: quiet(compile=True).check(Classifier(), loader()), "compile", "as they are written"),
        (lambda: quiet(batch_size="auto").check(Classifier(), loader()), "batch_size", "found by fit"),
        (lambda: quiet(resident=True).check(Classifier(), loader()), "resident", "from the loader"),
        (lambda: quiet(limit_train_batches=0).check(Classifier(), loader()), "training_step", "limit_train_batches=0"),
        (lambda: quiet().check(Lazy(), loader()), "steps", "Run one batch through it first"),
        (lambda: quiet().check(Skips(), loader()), "training_step", "on_train_batch_start returned -1"),
        (lambda: quiet().check(Classifier(), batches()), "train data", "a generator can be read once only"),
        (lambda: quiet().check(Classifier(), DataLoader(Once(), 4)), "train data", "Once.samples, a list_iterator"),
    ],
)  # fmt: skip
def test_what_was_not_checked_has_its_reason(make: Callable[[], CheckReport], name: str, why: str) -> None:
    report = make()
    assert any(
        row.name == name and row.status == "not checked" and why in f"{row.seen} {row.line}" for row in report.rows
    ), str(report)
    assert report.ok


class Images(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(self.norm(x.unflatten(1, (2, 2, 2))).flatten(1))


class IgnoresSome(Classifier):
    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        # Never a whole batch, whose loss would be nan.
        ignored = torch.arange(len(y)) == 1
        return nn.functional.cross_entropy(self(x), torch.where(ignored, 255, y), ignore_index=255)


class OneByOne(Classifier):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.vmap(self.layers, randomness="different")(x)  # type: ignore[no-any-return]


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        while True:
            yield dataset(1)[0]


@pytest.mark.parametrize(
    ("make", "train", "arguments"),
    [
        # One image of several pixels has statistics.
        (Images, lambda: loader(41, shuffle=True), {}),
        # Labels that are ignored have no output.
        (IgnoresSome, lambda: loader(41, shuffle=True), {}),
        # No value of a layer can be read in torch.vmap.
        (OneByOne, lambda: loader(41, shuffle=True), {}),
        # An epoch without an end.
        (Classifier, lambda: DataLoader(Endless(), 4), {"max_steps": 50, "max_epochs": -1, "val_check_interval": 10}),
    ],
)
def test_what_is_right_is_not_said(make: Callable[[], Any], train: Callable[[], Any], arguments: Any) -> None:
    report = quiet(enable_checkpointing=True, **arguments).check(make(), train(), loader())
    assert not report.errors + report.warnings, str(report)


def test_data_that_is_read_once_is_all_there_afterwards() -> None:
    once, given = Once(), batches()
    assert quiet().check(Classifier(), DataLoader(once, 4)).ok
    assert quiet().check(Classifier(), given).ok
    assert len(list(once.samples)) == 16
    assert len(list(given)) == 4


class Sleeps(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        time.sleep(1.2)
        return dataset(8)[index]


def test_workers_that_hang_end_the_check_and_not_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaders, "WORKER_SECONDS", 0.1)
    report = quiet().check(Classifier(), DataLoader(Sleeps(), 1, shuffle=True, num_workers=1))
    (row,) = report.errors
    assert "gave no batch within 0.1 seconds" in row.seen


def test_every_loader_of_every_stage_is_read() -> None:
    class Data(L.LightningDataModule):
        def train_dataloader(self) -> Any:
            return {"a": loader(shuffle=True), "b": loader(8, shuffle=True)}

        def val_dataloader(self) -> Any:
            return [loader(8), loader(12, 6)]

        test_dataloader = predict_dataloader = val_dataloader

    class Model(Several):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return {"loss": self.loss(batch["a"]) + self.loss(batch["b"]), "size": 1}

    report = quiet().check(Model(), Data())
    rows = {row.name: row.seen for row in report.rows}
    for stage in ("validate", "test", "predict"):
        assert rows[f"{stage} batch [0]"].startswith("list of 2 (Tensor (4, 8) float32")
        assert rows[f"{stage} batch [1]"].startswith("list of 2 (Tensor (6, 8) float32")
    assert rows["train batch"].startswith("dict of 2 {'a': list of 2")
    assert rows["predict_step"] == "returned Tensor (4, 2) float32"
    assert rows["training_step"].startswith("returned dict of 2 {'loss': Tensor ()")
    assert report.ok, str(report)

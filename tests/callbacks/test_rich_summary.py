"""RichModelSummary: the table of layers drawn with rich."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest
import torch
from torch import nn

import hasten as L
from hasten.callbacks import ModelSummary, RichModelSummary, RichProgressBar, TQDMProgressBar
from tests.models import quiet

rich = pytest.importorskip("rich")


@pytest.mark.parametrize("kind", [RichProgressBar, RichModelSummary])
def test_without_rich(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    with pytest.raises(
        ModuleNotFoundError, match=rf"{kind.__name__}\(\) needs the package rich.*pip install rich"
    ):
        kind()


class Net(L.LightningModule):
    def __init__(self, example: bool = True) -> None:
        super().__init__()
        self.body = nn.Linear(4, 8)
        self.head = nn.Linear(8, 2).requires_grad_(False)
        if example:
            self.example_input_array = torch.zeros(3, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.body.parameters(), lr=0.1)


def table(capsys: pytest.CaptureFixture[str], model: L.LightningModule, **options: Any) -> list[list[str]]:
    """Return the cells of each row of the table, and the lines below it."""
    quiet(callbacks=[RichModelSummary(**options)], enable_model_summary=True).fit(model, [torch.zeros(3, 4)])
    lines = capsys.readouterr().out.splitlines()
    return [[cell.strip() for cell in re.split(r"[│┃]", line.strip("│┃ "))] for line in lines if line.strip()]


def test_the_table_of_layers(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rich, "_console", None)
    monkeypatch.setenv("COLUMNS", "120")
    rows = table(capsys, Net())
    assert ["Name", "Type", "Params", "Mode", "FLOPs", "In sizes", "Out sizes"] in rows
    assert ["0", "body", "Linear", "40", "train", "192", "[3, 4]", "[3, 8]"] in rows
    assert ["1", "head", "Linear", "18", "train", "96", "[3, 8]", "[3, 2]"] in rows
    for line in (
        "Trainable params: 40",
        "Non-trainable params: 18",
        "Total params: 58",
        "Total estimated model params size (MB): 0.000",
        "Modules in train mode: 2",
        "Modules in eval mode: 0",
        "Total FLOPs (forward of the example): 288",
    ):
        assert [line] in rows
    monkeypatch.setattr(rich, "_console", None)
    assert ["0", "body", "Linear", "40", "train"] in table(capsys, Net(example=False), header_style="red")
    monkeypatch.setattr(rich, "_console", None)
    assert table(capsys, Net(), max_depth=0) == []


def test_the_table_goes_with_the_bar() -> None:
    def kinds(**arguments: Any) -> list[type]:
        trainer = quiet(**{"enable_model_summary": True, **arguments})
        return [type(callback) for callback in trainer.callbacks if isinstance(callback, ModelSummary)]

    assert kinds(callbacks=[RichProgressBar()], enable_progress_bar=True) == [RichModelSummary]
    assert kinds(callbacks=[TQDMProgressBar()], enable_progress_bar=True) == [ModelSummary]
    assert kinds(callbacks=[RichProgressBar(), ModelSummary()], enable_progress_bar=True) == [ModelSummary]
    assert kinds(callbacks=[RichProgressBar()], enable_progress_bar=True, enable_model_summary=False) == []

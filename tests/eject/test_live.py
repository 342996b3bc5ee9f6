"""``Trainer.eject`` for objects that exist: the classes and what they use, and a function that trains."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import hasten as L
from hasten.callbacks import EarlyStopping
from hasten_tools.eject import EjectError
from tests.eject.running import check_form
from tests.models import Classifier, loader, quiet, same_weights
from tests.refusals import refused

SCALE = 0.5


def scaled(loss: torch.Tensor) -> torch.Tensor:
    return loss * SCALE


class Scaled(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return scaled(self.loss(batch))


def test_classes_of_a_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = Scaled()
    twin = copy.deepcopy(model)
    trainer = quiet(max_epochs=2, accumulate_grad_batches=3, callbacks=[EarlyStopping("val_loss")])
    text = trainer.eject(model, loader(), loader(), output=tmp_path / "plain.py")
    assert (tmp_path / "plain.py").read_text() == text
    check_form(text)
    assert "SCALE = 0.5" in text
    assert "def scaled(" in text
    program: dict[str, Any] = {"__name__": "plain"}
    exec(compile(text, "plain.py", "exec"), program)
    trainer.fit(model, loader(), loader())
    plain = program["Scaled"]()
    plain.load_state_dict(twin.state_dict())
    program["train"](plain, loader(), loader())
    assert same_weights(model, plain)


def test_a_class_without_source_is_named() -> None:
    namespace: dict[str, Any] = {"L": L, "__name__": "somewhere"}
    exec(
        "class Hidden(L.LightningModule):\n    def training_step(self, batch, batch_idx):\n        return batch",
        namespace,
    )
    hidden = namespace["Hidden"]()
    hidden.configure_optimizers = lambda: torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    with refused(EjectError, says="Hidden"):
        quiet().eject(hidden, loader())

"""What a program written for Lightning relies on in the Trainer, where hasten does something else on purpose."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import hasten.compat
from hasten.utilities.warnings import PossibleUserWarning
from tests.models import Classifier, loader, quiet


@pytest.fixture(autouse=True)
def alias() -> Iterator[None]:
    hasten.compat.install()
    yield
    hasten.compat.uninstall()


def test_empty_loaders_are_a_warning() -> None:
    nothing: Any = DataLoader(TensorDataset(torch.empty(0, 8), torch.empty(0, dtype=torch.long)), 4)
    trainer = quiet()
    with pytest.warns(UserWarning, match="the train dataloader has no batches"):
        trainer.fit(Classifier(), nothing)
    assert trainer.global_step == 0
    with pytest.warns(UserWarning, match="the validate dataloader has no batches"):
        quiet().fit(Classifier(), loader(), nothing)
    with pytest.warns(UserWarning, match="the validate dataloader has no batches"):
        assert quiet().validate(Classifier(), nothing) == []
    with pytest.warns(UserWarning, match="the test dataloader has no batches"):
        assert quiet().test(Classifier(), []) == []
    with pytest.warns(UserWarning, match="the predict dataloader has no batches"):
        assert quiet().predict(Classifier(), nothing) is None
    with pytest.raises(TypeError, match="there is no data"):
        quiet().fit(Classifier())


def test_advice_about_loaders_has_the_type_that_programs_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hasten.data.advice.usable_cores", lambda: 8)
    few: Any = loader(8)
    shuffled: Any = DataLoader(few.dataset, 4, shuffle=True)
    kept: Any = DataLoader(few.dataset, 4, num_workers=2, persistent_workers=True, pin_memory=True)
    spawned: Any = DataLoader(few.dataset, 4, num_workers=1, multiprocessing_context="spawn")
    with pytest.warns(PossibleUserWarning) as record:
        quiet().validate(Classifier(), shuffled)
    texts = "\n".join(str(one.message) for one in record if one.category is PossibleUserWarning)
    assert "val_dataloader does not have many workers" in texts
    assert "val_dataloader has shuffling enabled" in texts
    with pytest.warns(PossibleUserWarning, match="the combination with"):
        quiet(reload_dataloaders_every_n_epochs=1, limit_train_batches=0).fit(Classifier(), kept)
    with pytest.warns(UserWarning, match="persistent_workers=True"):
        quiet(limit_train_batches=0).fit(Classifier(), spawned)

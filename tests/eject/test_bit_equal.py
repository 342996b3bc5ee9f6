"""An ejected program trains the weights that the program with hasten trains, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.eject.running import check_form, eject, fits, same
from tests.programs import ROOT

pytest.importorskip("sklearn")
# What makes them short: the number of epochs or steps does not matter here.
SHORTER = {
    "gan.py": [("epochs: int = 30", "epochs: int = 2"), ("samples: int = 2048", "samples: int = 500")],
    "kfold.py": [("folds: int = 5, epochs: int = 5", "folds: int = 2, epochs: int = 1")],
    "finetuning.py": [("max_epochs=3", "max_epochs=1")],
    "ema_and_swa.py": [("max_epochs=8", "max_epochs=3")],
    "language_model.py": [("max_steps=150", "max_steps=5")],
}


@pytest.mark.parametrize("name", SHORTER)
def test_example(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "examples" / name).read_text(encoding="utf-8")
    for old, new in SHORTER[name]:
        assert old in text
        text = text.replace(old, new)
    plain = eject(text, tmp_path / name)
    check_form(plain)
    assert same(fits(text, plain=False), fits(plain, plain=True))

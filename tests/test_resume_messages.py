"""What a program is told that resumes from the wrong place."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import hasten as L
from tests.callbacks.resuming import SaveAt
from tests.models import Classifier, loader, quiet
from tests.refusals import refused, warned


def trained(path: Path, **arguments: Any) -> None:
    trainer = quiet(**arguments)
    trainer.fit(Classifier(), loader(16))
    trainer.save_checkpoint(path)


def test_a_checkpoint_past_max_epochs_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    trained(path, max_epochs=3)
    with refused(ValueError, "ckpt_path", fix="max_epochs=4"):
        quiet(max_epochs=2).fit(Classifier(), loader(16), ckpt_path=path)
    middle = tmp_path / "b.ckpt"
    quiet(max_epochs=3, callbacks=[SaveAt(middle, 10)]).fit(Classifier(), loader(16))
    with refused(ValueError, "ckpt_path", fix="max_epochs=3"):
        quiet(max_epochs=2).fit(Classifier(), loader(16), ckpt_path=middle)
    # Only fit trains.
    quiet(max_epochs=2).validate(Classifier(), loader(16), ckpt_path=path, verbose=False)


def test_a_checkpoint_with_nothing_left_to_train_says_so(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    trained(path, max_epochs=3)
    trainer = quiet(max_epochs=3)
    with warned(UserWarning, says=("max_epochs=3", "max_epochs=4")):
        trainer.fit(Classifier(), loader(16), ckpt_path=path)
    assert trainer.global_step == 12
    with warned(UserWarning, says=("12 steps", "max_steps=10", "max_steps=13")):
        quiet(max_epochs=-1, max_steps=10).fit(Classifier(), loader(16), ckpt_path=path)


def test_a_checkpoint_with_something_left_says_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    trained(path, max_epochs=1)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*nothing is left")
        quiet(max_epochs=2).fit(Classifier(), loader(16), ckpt_path=path)
        quiet(max_epochs=-1, max_steps=5).fit(Classifier(), loader(16), ckpt_path=path)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("lastt", "Did you mean 'last'"),
        ("Best", "Did you mean 'best'"),
        ("epoch-3.ckpt", "Did you mean 'epoch=3.ckpt'"),
        ("runs/epoch-3.ckpt", "Did you mean 'epoch=3.ckpt'"),
        ("run/epoch=3.ckpt", "the folder 'run' does not exist. Did you mean 'runs'"),
        ("zzz", "the file does not exist."),
        ("~/a.ckpt", "os.path.expanduser"),
        ("note.ckpt", "the file does not exist."),
        ("hand.pt", "torch.load(path)['model']"),
    ],
)
def test_the_nearest_word_or_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    for folder in (tmp_path, tmp_path / "runs"):
        (folder / "epoch=3.ckpt").touch()
    (tmp_path / "notes.yaml").touch()
    torch.save({"model": Classifier().state_dict(), "step": 3}, tmp_path / "hand.pt")
    for call in ("fit", "validate"):
        with pytest.raises((FileNotFoundError, ValueError)) as caught:
            getattr(quiet(), call)(Classifier(), loader(8), ckpt_path=given)
        assert given in str(caught.value)
        assert words in str(caught.value)
        assert "notes.yaml" not in str(caught.value)


def test_hyper_parameters_that_no_checkpoint_holds_are_named_once(tmp_path: Path) -> None:
    class Model(Classifier):
        def __init__(self, width: int, activation: Any, batches: Any) -> None:
            super().__init__()
            self.save_hyperparameters()

    module = Model(4, activation=lambda x: x, batches=(i for i in range(3)))
    trainer = quiet(max_epochs=2)
    trainer.fit(module, loader(8))
    with warned(UserWarning, says=("['activation'", "'batches'", "ignore=")):
        trainer.save_checkpoint(tmp_path / "a.ckpt")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.save_checkpoint(tmp_path / "b.ckpt")
    kept = torch.load(tmp_path / "a.ckpt", weights_only=True)["hyper_parameters"]
    assert kept["width"] == 4
    with refused(TypeError, fix="load_from_checkpoint"):
        Model.load_from_checkpoint(tmp_path / "a.ckpt")


def test_shell_code_in_variables_of_slurm_is_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marker = tmp_path / "ran"
    code = f"$(touch {marker}); touch {marker} `touch {marker}` && touch {marker} | ../../../escaped"
    inside = tmp_path / "inside"
    inside.mkdir()
    monkeypatch.chdir(inside)
    for name in ("JOB_NAME", "JOB_ID", "STEP_ID", "NODELIST", "JOB_NODELIST", "SUBMIT_DIR", "ARRAY_JOB_ID"):
        monkeypatch.setenv(f"SLURM_{name}", code)
    monkeypatch.setenv("SLURM_NTASKS", "1")
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.delenv("HASTEN_JOB", raising=False)
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=L.loggers.CSVLogger(inside),
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(), loader(8))
    assert not marker.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["inside"]
    assert not list(Path(tmp_path.parent).glob("*escaped*"))

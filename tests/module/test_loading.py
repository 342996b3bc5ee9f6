"""LightningModule.load_from_checkpoint in all its forms, and its errors for files that do not fit."""

from __future__ import annotations

from fractions import Fraction
from io import BytesIO
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import hasten as L
from hasten._lib.errors import notes_of
from hasten.checkpoint import files
from hasten.module.hparams import StoredHyperParameters
from hasten.utilities.hooks import CheckpointHooks
from tests.models import quiet, same_weights
from tests.refusals import refused, warned


class Net(L.LightningModule):
    def __init__(self, width: int = 4, extra: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.width = width
        self.a = nn.Linear(2, width)
        if extra:
            self.b = nn.Linear(width, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.a(batch).mean()

    def test_step(self, batch: Any, batch_idx: int) -> None: ...

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Net, Path]:
    model, path = Net(3), tmp_path_factory.mktemp("saved") / "net.ckpt"
    trainer = quiet()
    trainer.fit(model, [torch.ones(2, 2)])
    trainer.save_checkpoint(path)
    return model, path


@pytest.mark.parametrize("form", [Path, str, lambda path: BytesIO(path.read_bytes()), lambda path: f"file://{path}"])
def test_every_form_of_a_path(saved: tuple[Net, Path], form: Any) -> None:
    model, path = saved
    again = Net.load_from_checkpoint(form(path))
    assert same_weights(model, again)
    assert (again.width, dict(again.hparams)) == (3, {"width": 3, "extra": False})
    assert again.training


@pytest.mark.parametrize(
    "map_location",
    [torch.device("meta"), lambda storage, location: torch.UntypedStorage(len(storage), device="meta")],
)
def test_the_model_goes_where_the_weights_go(saved: tuple[Net, Path], map_location: Any) -> None:
    assert Net.load_from_checkpoint(saved[1], map_location=map_location).device == torch.device("meta")


def test_a_hook_of_a_mixin_may_change_what_is_loaded(saved: tuple[Net, Path]) -> None:
    class Mixin(CheckpointHooks):
        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["state_dict"]["a.bias"].fill_(7.0)

    class Changes(Net, Mixin): ...

    assert isinstance(saved[0], CheckpointHooks)
    assert Changes.load_from_checkpoint(saved[1]).a.bias.tolist() == [7.0] * 3


class Doubling(nn.Linear):
    """Has twice the weights of its first version."""

    _version = 2

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
        if local_metadata.get("version") != 2:
            state_dict[prefix + "weight"] = state_dict[prefix + "weight"] * 2
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


class Versioned(Net):
    def __init__(self) -> None:
        super().__init__()
        self.a = Doubling(2, 4)


@pytest.mark.parametrize("form", ["file", "folder", "averaged", "pruned"])
def test_weights_keep_the_versions_of_their_modules(tmp_path: Path, form: str) -> None:
    def fit(model: Versioned, **options: Any) -> L.Trainer:
        average: list[Any] = [L.callbacks.EMAWeightAveraging()] if form == "averaged" else []
        prune = [L.callbacks.ModelPruning("l1_unstructured", amount=1)] if form == "pruned" else []
        trainer = quiet(max_epochs=1, callbacks=average + prune)
        trainer.fit(model, [torch.ones(2, 2)], **options)
        return trainer

    model, path = Versioned(), tmp_path / "a.ckpt"
    fit(model).save_checkpoint(path)
    if form == "folder":
        checkpoint, path = files.load(path), tmp_path / "folder.ckpt"
        files.save_folder(checkpoint, path)
    assert same_weights(Versioned.load_from_checkpoint(path), model)
    again = Versioned()
    fit(again, ckpt_path=path)
    assert same_weights(again, model)


def test_arguments_given_replace_those_stored(saved: tuple[Net, Path], tmp_path: Path) -> None:
    path = saved[1]
    assert Net.load_from_checkpoint(path, extra=False, strict=True).hparams == {"width": 3, "extra": False}
    with pytest.raises(RuntimeError) as caught:
        Net.load_from_checkpoint(path, width=5)
    text = str(caught.value)
    assert f"The weights in {path} do not fit Net." in text
    assert "mis-shaped (2): a.weight: (3, 2) in the file, (5, 2) in the model, a.bias: (3,)" in text
    assert "hyper-parameters the file was trained with" in text
    with refused(TypeError, says="'widht'"):
        Net.load_from_checkpoint(path, widht=5)


def test_what_load_state_dict_cannot_take_is_told_what_to_write(saved: tuple[Net, Path]) -> None:
    model = Net(width=3)
    checkpoint = torch.load(saved[1])
    for strict in (True, False):
        with refused(RuntimeError, "state_dict", fix="checkpoint['state_dict']"):
            model.load_state_dict(checkpoint, strict=strict)
    weights = checkpoint["state_dict"]
    with pytest.raises(RuntimeError) as caught:
        model.load_state_dict({f"module.{name}": value for name, value in weights.items()})
    assert "name.removeprefix('module.')" in notes_of(caught.value)[0].fix
    with pytest.raises(RuntimeError) as caught:
        model.load_state_dict({name.removeprefix("a."): value for name, value in weights.items()})
    assert "Load them into model.a" in notes_of(caught.value)[0].fix
    assert not model.load_state_dict(weights).missing_keys


def test_names_of_a_compiled_layer_are_explained(saved: tuple[Net, Path], tmp_path: Path) -> None:
    class Compiled(Net):
        def __init__(self, width: int = 4, extra: bool = False) -> None:
            super().__init__(width, extra)
            self.a = cast("nn.Linear", torch.compile(self.a, backend="eager"))

    with pytest.raises(RuntimeError) as caught:
        Compiled.load_from_checkpoint(saved[1])
    assert "names of the model: call layer.compile() instead" in str(caught.value)
    path = tmp_path / "compiled.ckpt"
    torch.save({"state_dict": Compiled(width=3).state_dict()}, path)
    with pytest.raises(RuntimeError) as caught:
        Net.load_from_checkpoint(path, width=3)
    assert "name.replace('_orig_mod.', '')" in str(caught.value)
    names = {name.replace("_orig_mod.", ""): value for name, value in torch.load(path)["state_dict"].items()}
    assert not Net(width=3).load_state_dict(names).missing_keys


def test_missing_and_unexpected_keys_are_named(saved: tuple[Net, Path]) -> None:
    class Renamed(Net):
        def __init__(self, width: int = 4, extra: bool = False) -> None:
            super().__init__(width, extra)
            self.aa = self.a
            del self.a

    path = saved[1]
    with pytest.raises(RuntimeError) as caught:
        Renamed.load_from_checkpoint(path)
    text = str(caught.value)
    assert "missing (2): aa.weight, aa.bias" in text
    assert "unexpected (2): a.weight, a.bias" in text
    assert "'a.weight' looks like 'aa.weight': was a layer renamed?" in text

    class Larger(Net):
        def __init__(self, width: int = 4, extra: bool = False) -> None:
            super().__init__(width, extra)
            self.aa = nn.Linear(5, 5)
            del self.a

    with pytest.raises(RuntimeError) as caught:
        Larger.load_from_checkpoint(path)
    assert "missing (2): aa.weight, aa.bias" in str(caught.value)
    assert "looks like" not in str(caught.value)
    words = r"missing \(2\): b.weight, b.bias\nPass strict=False .* and fit without ckpt_path"
    with pytest.raises(RuntimeError, match=words):
        Net.load_from_checkpoint(path, extra=True)


def test_strict_loading_can_be_switched_off(saved: tuple[Net, Path]) -> None:
    model, path = saved

    class Loose(Net):
        def __init__(self, width: int = 4, extra: bool = True) -> None:
            super().__init__(width, True)
            self.strict_loading = False

    with warned(UserWarning, says=("strict=False", "b.weight")):
        loaded = Net.load_from_checkpoint(path, extra=True, strict=False), Loose.load_from_checkpoint(path)
    for again in loaded:
        assert torch.equal(again.a.weight, model.a.weight)
        assert again.b.weight.shape == (1, 3)
    with refused(ValueError, "strict"):
        Loose.load_from_checkpoint(path, strict=True)
    batches = [torch.ones(2, 2)]
    loose, strict = Loose(3), Net(3, extra=True)
    # As if it were not set.
    strict.strict_loading = None
    quiet().test(loose, batches, ckpt_path=path, verbose=False)
    assert torch.equal(loose.a.weight, model.a.weight)
    with refused(RuntimeError, says="b.weight, b.bias"):
        quiet().test(strict, batches, ckpt_path=path, verbose=False)


def test_arguments_that_are_not_stored_are_named(tmp_path: Path) -> None:
    class Needs(Net):
        def __init__(self, depth: int, *rest: Any, name: str, **others: Any) -> None:
            super().__init__()
            self.hparams.clear()
            self.given = (depth, name, others)

    path = tmp_path / "needs.ckpt"
    trainer = quiet()
    trainer.fit(Needs(2, name="n"), [torch.ones(2, 2)])
    trainer.save_checkpoint(path)
    with pytest.raises(TypeError) as caught:
        Needs.load_from_checkpoint(path)
    assert "the checkpoint does not hold ['depth', 'name'] of __init__" in str(caught.value)
    assert "load_from_checkpoint(path, depth=..., name=...)" in str(caught.value)
    assert Needs.load_from_checkpoint(path, depth=4, name="m", more=5).given == (4, "m", {"more": 5})


def test_what_is_no_path_is_named(saved: tuple[Net, Path]) -> None:
    for given in (None, ["a.ckpt"], 3):
        with refused(TypeError, "checkpoint_path", says=repr(given)):
            Net.load_from_checkpoint(given)  # type: ignore[arg-type]
    with refused(TypeError, "hparams_file", fix="by name"):
        Net.load_from_checkpoint(saved[1], "cpu", 3)  # type: ignore[arg-type]


def test_hyper_parameters_of_a_file(saved: tuple[Net, Path], tmp_path: Path) -> None:
    def load(name: str, text: str, **arguments: Any) -> Net:
        (tmp_path / name).write_text(text)
        return Net.load_from_checkpoint(saved[1], hparams_file=tmp_path / name, **arguments)

    texts = {"h.yaml": "width: 3\nunknown: 1\n", "h.yml": "width: 3", "h.csv": "key,value\nwidth,3\n"}
    # As Lightning writes a tuple.
    texts["t.yaml"] = "unknown: !!python/tuple\n- 1\n- [2]\nwidth: 3\n"
    for name, text in texts.items():
        assert load(name, text).width == 3
        with refused(RuntimeError, says="a.weight: (3,"):
            load(name, text, width=9)
    assert load("values.csv", "key,value\nwidth,3\nextra,None\n").hparams.extra is None
    with refused(ValueError, "hparams_file"):
        load("h.txt", "width: 3")
    with refused(ValueError, "hparams_file"):
        load("h.yaml", "- 1\n- 2")


class TakesKwargs(L.LightningModule):
    def __init__(self, kwargs: Any) -> None:
        super().__init__()
        self.save_hyperparameters(kwargs)


class TakesConfig(L.LightningModule):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.save_hyperparameters(config)


class TakesBoth(L.LightningModule):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.save_hyperparameters(config)
        self.config = config


def test_one_argument_that_holds_all_is_passed_as_one(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"

    def loaded(model: L.LightningModule) -> Any:
        torch.save({"state_dict": model.state_dict(), **StoredHyperParameters((model,)).state_dict()}, path)
        return type(model).load_from_checkpoint(path)

    assert dict(loaded(TakesKwargs({"width": 3})).hparams) == {"width": 3}
    assert loaded(TakesConfig({"config": {"inner": 1}, "width": 3})).hparams == {"config": {"inner": 1}, "width": 3}
    assert dict(loaded(TakesBoth({"width": 3})).config) == {"width": 3}


def test_objects_in_a_file_are_read_only_when_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "objects.ckpt"
    torch.save({"state_dict": Net().state_dict(), "hyper_parameters": {"width": 4}, "other": Fraction(1, 2)}, path)
    with refused(Exception, fix="weights_only=False"):
        Net.load_from_checkpoint(path)
    assert Net.load_from_checkpoint(path, weights_only=False).width == 4
    with refused(Exception, says=("weights_only=False", "add_safe_globals")):
        Net.load_from_checkpoint(BytesIO(path.read_bytes()))
    assert Net.load_from_checkpoint(BytesIO(path.read_bytes()), weights_only=False).width == 4
    # torch's own variable counts where nothing is passed.
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    with warned(UserWarning, says=("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD",)):
        assert Net.load_from_checkpoint(path).width == 4
        assert L.Fabric(accelerator="cpu").load(path)["other"] == Fraction(1, 2)
    with refused(Exception, fix="weights_only=False"):
        Net.load_from_checkpoint(path, weights_only=True)

"""Pruning: equal to torch's own, zeros in checkpoints, and a resumed run that knows its masks."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import hasten as L
from hasten.callbacks import LambdaCallback, ModelCheckpoint, ModelPruning
from tests.callbacks.resuming import SaveLast, assert_resumes_exactly, assert_same, fitted, weights
from tests.models import Classifier, loader, quiet
from tests.refusals import refused


def zeros(module: nn.Module | dict[str, Tensor], name: str) -> int:
    state = module if isinstance(module, dict) else module.state_dict()
    return int((state[name] == 0).sum())


def by_hand(prunes: Any, *, data: Any) -> dict[str, Tensor]:
    """Return the weights of three epochs of a loop that calls ``prunes(model, epoch, initial model)``."""
    L.seed_everything(0, verbose=False)
    model = Classifier(width=6)
    first = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(3):
        for x, y in data:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model.layers(x), y).backward()
            optimizer.step()
        prunes(model, epoch, first)
    for module, name in pairs(model):
        if hasattr(module, name + "_orig"):
            prune.remove(module, name)
    return model.state_dict()


def pairs(model: Classifier) -> list[tuple[nn.Module, str]]:
    return [(model.layers[i], name) for name in ("weight", "bias") for i in (0, 3)]


class WithoutForward(Classifier):
    forward = L.LightningModule.forward

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.scale = nn.Parameter(torch.ones(4))


def make() -> Classifier:
    return Classifier(width=6)


def pruning(*arguments: Any, kind: type[ModelPruning] = ModelPruning, **options: Any) -> Any:
    """Return a function that makes a list with the callback; l1_unstructured by default."""
    return lambda: [kind(*(arguments or ("l1_unstructured",)), **{"amount": 0.5, **options})]


def test_global_pruning_equals_torch_by_hand() -> None:
    def prunes(model: Classifier, epoch: int, first: Classifier) -> None:
        prune.global_unstructured(pairs(model), pruning_method=prune.L1Unstructured, amount=0.3)

    data, callbacks = loader(24), pruning(amount=0.3, use_lottery_ticket_hypothesis=False)
    trainer = fitted(make, callbacks, data=data, max_epochs=3)
    found = weights(trainer)
    assert list(found) == list(make().state_dict())  # The order of parameters is as it was.
    assert_same(found, dict(by_hand(prunes, data=data)))
    # Of 68: 30 % are 20, of the 48 left 14, of the 34 left 10.
    assert sum(zeros(found, name) for name in found) == 44


@pytest.mark.parametrize(
    ("name", "options", "function"),
    [
        ("l1_unstructured", {}, lambda m, a: prune.l1_unstructured(m, "weight", a)),
        ("ln_structured", {"dim": 0, "norm": 1}, lambda m, a: prune.ln_structured(m, "weight", a, 1, 0)),
        ("LN_structured", {"dim": 1, "norm": 2}, lambda m, a: prune.ln_structured(m, "weight", a, 2, 1)),
    ],
)
def test_local_pruning_equals_torch_by_hand(name: str, options: dict[str, Any], function: Any) -> None:
    def prunes(model: Classifier, epoch: int, first: Classifier) -> None:
        if epoch > 0:
            for layer in (model.layers[0], model.layers[3]):
                function(layer, 0.25 * epoch)

    data = loader(24)
    given: dict[str, Any] = {f"pruning_{key}": value for key, value in options.items()}
    given |= {"parameter_names": ["weight"], "amount": lambda epoch: 0.25 * epoch}
    given |= {"use_global_unstructured": False, "use_lottery_ticket_hypothesis": False}
    found = weights(fitted(make, pruning(name, **given), data=data, max_epochs=3))
    assert_same(found, dict(by_hand(prunes, data=data)))
    assert zeros(found, "layers.0.weight") > 0
    assert zeros(found, "layers.0.bias") == 0


def test_the_lottery_ticket_goes_back_to_the_first_weights() -> None:
    def prunes(model: Classifier, epoch: int, first: Classifier) -> None:
        prune.global_unstructured(pairs(model), pruning_method=prune.L1Unstructured, amount=0.4)
        if epoch == 1:
            for (module, name), (original, _) in zip(pairs(model), pairs(first), strict=True):
                getattr(module, name + "_orig").data.copy_(getattr(original, name))

    data = loader(24)
    callbacks = pruning(amount=0.4, use_lottery_ticket_hypothesis=lambda epoch: epoch == 1)
    trainer = fitted(make, callbacks, data=data, max_epochs=3)
    assert_same(weights(trainer), dict(by_hand(prunes, data=data)))


def test_the_lottery_ticket_can_draw_new_weights() -> None:
    L.seed_everything(0, verbose=False)
    first, seen = make().layers[0].weight.detach().clone(), []
    look = LambdaCallback(
        on_train_epoch_end=lambda trainer, module: seen.append(module.layers[0].weight.detach().clone())
    )
    fitted(make, lambda: [*pruning(resample_parameters=True)(), look], max_epochs=2)
    for now in seen:
        kept = now != 0
        assert 0 < int(kept.sum()) < kept.numel()
        assert not torch.equal(now[kept], first[kept])
        assert now.abs().max() <= 8**-0.5  # The range that a linear layer of 8 draws from.
    assert not torch.equal(seen[0][seen[1] != 0], seen[1][seen[1] != 0])


@pytest.mark.parametrize(("permanent", "lottery"), [(True, False), (False, True)])
def test_a_resumed_run_goes_on_exactly(tmp_path: Path, permanent: bool, lottery: bool) -> None:
    options = {"amount": 0.4, "make_pruning_permanent": permanent}
    callbacks = pruning(use_lottery_ticket_hypothesis=lambda epoch: lottery and epoch == 1, **options)
    whole = assert_resumes_exactly(tmp_path, make, callbacks, [3, 8, 12, 17], max_epochs=3)
    assert ("layers.0.weight_orig" in weights(whole)) != permanent


def test_a_run_resumed_at_the_end_of_an_epoch_prunes_that_epoch_once(tmp_path: Path) -> None:
    def save(trainer: L.Trainer, module: L.LightningModule) -> None:
        trainer.save_checkpoint(tmp_path / f"{trainer.current_epoch}.ckpt")

    done = ModelCheckpoint(tmp_path, filename="done")
    options: dict[str, Any] = {"max_epochs": 2, "enable_checkpointing": True}
    whole = fitted(make, pruning(amount=0.3), LambdaCallback(on_train_epoch_end=save), done, **options)
    for name in ("0", "1", "done"):
        resumed = fitted(make, pruning(amount=0.3), ckpt_path=tmp_path / f"{name}.ckpt", seed=9, max_epochs=2)
        assert_same(weights(resumed), weights(whole))


def test_checkpoints_hold_plain_weights_with_zeros(tmp_path: Path) -> None:
    class Odd(Classifier):
        def __init__(self, width: int = 6) -> None:
            super().__init__(width)
            # A name that ends like that of a mask.
            self.register_buffer("own_mask", torch.ones(0))

    saver = SaveLast(tmp_path / "a.ckpt", 8)
    fitted(Odd, pruning(), saver, max_epochs=2)
    stored = torch.load(saver.path, weights_only=True)["state_dict"]
    assert list(stored) == list(Odd().state_dict())
    total = sum(value.numel() for value in stored.values())
    assert sum(zeros(stored, name) for name in stored) == total // 2
    assert_same(dict(Odd.load_from_checkpoint(saver.path).state_dict()), stored)


def test_a_checkpoint_with_masks_evaluates_with_the_callback(tmp_path: Path) -> None:
    callbacks = pruning(make_pruning_permanent=False)
    trainer = fitted(make, callbacks, max_epochs=2)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    stored = torch.load(tmp_path / "a.ckpt", weights_only=True)["state_dict"]
    assert "layers.0.weight_mask" in stored
    model = make()
    quiet(callbacks=callbacks()).test(model, loader(8), ckpt_path=tmp_path / "a.ckpt", verbose=False)
    expected = stored["layers.0.weight_orig"] * stored["layers.0.weight_mask"]
    assert torch.equal(model.layers[0].weight, expected)
    assert list(model.state_dict()) == list(make().state_dict())
    # The very model that is pruned can load it, too.
    assert trainer.lightning_module is not None
    trainer.test(trainer.lightning_module, loader(8), ckpt_path=tmp_path / "a.ckpt", verbose=False)
    assert torch.equal(trainer.lightning_module.layers[0].weight, expected)  # type: ignore[union-attr,arg-type]


def test_pruning_after_validation() -> None:
    def in_all(trainer: L.Trainer) -> int:
        return sum(zeros(weights(trainer), f"layers.{layer}.weight") for layer in (0, 3))

    seen: list[bool] = []
    look = LambdaCallback(on_train_start=lambda trainer, module: seen.append(hasattr(module.layers[0], "weight_mask")))
    options = {"parameter_names": ["weight"], "prune_on_train_epoch_end": False}
    callbacks = pruning("random_unstructured", amount=10, **options)
    trainer = fitted(make, callbacks, look, validation=loader(4), max_epochs=2)
    assert in_all(trainer) == 20
    trainer.validate(trainer.lightning_module, loader(4), verbose=False)
    assert in_all(trainer) == 20
    # The sanity check does not prune.
    quiet(callbacks=[*callbacks(), look], num_sanity_val_steps=1).fit(make(), loader(4), loader(4))
    assert seen == [False, False]


@pytest.mark.parametrize(
    ("options", "trainer"),
    [
        ({"apply_pruning": False}, {}),
        ({"apply_pruning": lambda epoch: epoch > 5}, {}),
        ({"amount": 0.0}, {}),
        ({}, {"max_steps": 4}),  # The epoch is cut short.
    ],
)
def test_nothing_is_pruned(options: dict[str, Any], trainer: dict[str, Any]) -> None:
    assert zeros(weights(fitted(make, pruning(**options), **trainer)), "layers.0.weight") == 0


def test_chosen_parameters_and_own_methods() -> None:
    class Largest(prune.BasePruningMethod):
        PRUNING_TYPE = "unstructured"

        def compute_mask(self, t: Tensor, default_mask: Tensor) -> Tensor:
            mask = default_mask.clone()
            mask.view(-1)[t.abs().view(-1).argmax()] = 0
            return mask

        def __init__(self, amount: float) -> None:
            pass

    class Filtering(ModelPruning):
        def filter_parameters_to_prune(self, parameters_to_prune: Any = ()) -> Any:
            return [pair for pair in parameters_to_prune if pair[1] == "weight"]

    L.seed_everything(0, verbose=False)
    model = make()
    chosen = [(model.layers[3], "weight"), (model.layers[3], "bias")]
    callbacks = pruning(Largest, kind=Filtering, parameters_to_prune=chosen)
    found = weights(fitted(lambda: model, callbacks, max_epochs=3))
    assert zeros(found, "layers.3.weight") == 3
    assert zeros(found, "layers.3.bias") == zeros(found, "layers.0.weight") == 0


def test_what_is_pruned_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    def reported(**options: Any) -> list[str]:
        caplog.clear()
        with caplog.at_level("INFO"):
            fitted(make, pruning(parameter_names=["bias"], amount=4, **options), max_epochs=2)
        return [record.message for record in caplog.records if "%)" in record.message]

    lines = reported(verbose=2)
    assert lines[3] == "Applied `L1Unstructured`. Pruned: 4/8 (50.00%) -> 8/8 (100.00%)"
    where = "Linear(in_features=6, out_features=2, bias=True).bias"
    assert lines[5].startswith(f"Applied `L1Unstructured` to `{where}` with amount=4. Pruned: ")
    assert (len(lines), len(reported(verbose=1)), reported()) == (6, 2, [])


def test_parameters_that_are_not_there_are_refused() -> None:
    model = make()
    for given, message in (
        ([(nn.Linear(2, 2), "weight")], "the Linear with 'weight' is not part of Classifier"),
        ([(model.layers[0], "wight")], r"Linear has no parameter 'wight'; it has \['weight', 'bias'\].*weight"),
        ([(model.layers[1], "weight")], "ReLU has no parameter 'weight'"),
        ([("layers", "weight")], r"\('layers', 'weight'\) is not a pair"),
        ([(model.layers[0],)], "is not a pair of a module and a parameter's name"),
        (model.layers[0], "is not a pair"),
    ):
        with pytest.raises(ValueError, match=message):
            quiet(callbacks=pruning(parameters_to_prune=given)()).fit(model, loader(4))

    class Nothing(ModelPruning):
        def filter_parameters_to_prune(self, parameters_to_prune: Any = ()) -> Any:
            return []

    with refused(ValueError, says=("['weight'", "'bias'")):
        quiet(callbacks=[Nothing("l1_unstructured")]).fit(model, loader(4))
    model.attention = nn.MultiheadAttention(4, 1)
    own = WithoutForward(6)
    for given, trained, path in (((), model, "'attention.out_proj.weight'"), ([(own, "scale")], own, "scale")):
        with refused(ValueError, "parameters_to_prune", fix="[(model.layer, 'weight'), ...]", says=path):
            quiet(callbacks=pruning(parameters_to_prune=given)()).fit(trained, loader(4))


def test_none_prunes_all_parameters() -> None:
    given, none = (weights(fitted(make, pruning(**options))) for options in ({}, {"parameters_to_prune": None}))
    assert_same(given, none)

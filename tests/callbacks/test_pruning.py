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
from hasten.callbacks import ModelPruning
from tests.callbacks.resuming import SaveAt, SaveLast, assert_resumes_exactly, assert_same, fitted, weights
from tests.models import Classifier, loader, quiet


def zeros(module: nn.Module | dict[str, Tensor], name: str) -> int:
    state = module if isinstance(module, dict) else module.state_dict()
    return int((state[name] == 0).sum())


def by_hand(prunes: Any, *, epochs: int, data: Any, final: bool = True) -> Classifier:
    L.seed_everything(0, verbose=False)
    model = Classifier(width=6)
    first = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(epochs):
        for x, y in data:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model.layers(x), y).backward()
            optimizer.step()
        prunes(model, epoch, first)
    for module in model.modules():
        for name in ("weight", "bias"):
            if final and hasattr(module, name + "_orig"):
                prune.remove(module, name)
    return model


def pairs(model: Classifier) -> list[tuple[nn.Module, str]]:
    return [
        (model.layers[0], "weight"),
        (model.layers[3], "weight"),
        (model.layers[0], "bias"),
        (model.layers[3], "bias"),
    ]


def make() -> Classifier:
    return Classifier(width=6)


def test_global_pruning_equals_torch_by_hand() -> None:
    def prunes(model: Classifier, epoch: int, first: Classifier) -> None:
        prune.global_unstructured(pairs(model), pruning_method=prune.L1Unstructured, amount=0.3)

    data = loader(24)
    pruning = ModelPruning("l1_unstructured", amount=0.3, use_lottery_ticket_hypothesis=False)
    trainer = fitted(make, lambda: [pruning], data=data, max_epochs=3)
    found = weights(trainer)
    expected = by_hand(prunes, epochs=3, data=data).state_dict()
    assert list(found) == list(make().state_dict())  # The order of parameters is as it was.
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name
    # Of 68: 30 % are 20, of the 48 left 14, of the 34 left 10.
    assert sum(zeros(found, name) for name in found) == 44


@pytest.mark.parametrize(
    ("name", "options", "function"),
    [
        ("l1_unstructured", {}, lambda m, a: prune.l1_unstructured(m, "weight", a)),
        (
            "ln_structured",
            {"pruning_dim": 0, "pruning_norm": 1},
            lambda m, a: prune.ln_structured(m, "weight", a, n=1, dim=0),
        ),
        (
            "LN_structured",
            {"pruning_dim": 1, "pruning_norm": 2},
            lambda m, a: prune.ln_structured(m, "weight", a, 2, 1),
        ),
    ],
)
def test_local_pruning_equals_torch_by_hand(name: str, options: dict[str, Any], function: Any) -> None:
    def prunes(model: Classifier, epoch: int, first: Classifier) -> None:
        if epoch > 0:
            for layer in (model.layers[0], model.layers[3]):
                function(layer, 0.25 * epoch)

    data = loader(24)
    pruning = ModelPruning(
        name,
        parameter_names=["weight"],
        use_global_unstructured=False,
        amount=lambda epoch: 0.25 * epoch,
        use_lottery_ticket_hypothesis=False,
        **options,
    )
    trainer = fitted(make, lambda: [pruning], data=data, max_epochs=3)
    expected = by_hand(prunes, epochs=3, data=data).state_dict()
    assert_same(weights(trainer), {key: expected[key] for key in weights(trainer)})
    assert zeros(weights(trainer), "layers.0.weight") > 0
    assert zeros(weights(trainer), "layers.0.bias") == 0


def test_the_lottery_ticket_goes_back_to_the_first_weights() -> None:
    def prunes(model: Classifier, epoch: int, first: Classifier) -> None:
        prune.global_unstructured(pairs(model), pruning_method=prune.L1Unstructured, amount=0.4)
        if epoch == 1:
            for (module, name), (original, _) in zip(pairs(model), pairs(first), strict=True):
                getattr(module, name + "_orig").data.copy_(getattr(original, name))

    data = loader(24)
    pruning = ModelPruning(
        "l1_unstructured", amount=0.4, use_lottery_ticket_hypothesis=lambda epoch: epoch == 1
    )
    trainer = fitted(make, lambda: [pruning], data=data, max_epochs=3)
    expected = by_hand(prunes, epochs=3, data=data).state_dict()
    assert_same(weights(trainer), {key: expected[key] for key in weights(trainer)})


def test_right_after_the_ticket_the_model_is_that_of_the_beginning_with_zeros() -> None:
    seen: list[Tensor] = []

    class Look(L.Callback):
        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            seen.append(module.layers[0].weight.detach().clone())

    L.seed_everything(0, verbose=False)
    first = make().layers[0].weight.detach().clone()
    fitted(make, lambda: [ModelPruning("l1_unstructured", amount=0.5), Look()])
    kept = seen[0] != 0
    assert 0 < int(kept.sum()) < kept.numel()
    assert torch.equal(seen[0][kept], first[kept])


def test_fresh_first_values_are_drawn_where_asked() -> None:
    seen: list[Tensor] = []

    class Look(L.Callback):
        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            seen.append(module.layers[0].weight.detach().clone())

    L.seed_everything(0, verbose=False)
    first = make().layers[0].weight.detach().clone()
    pruning = ModelPruning("l1_unstructured", amount=0.5, resample_parameters=True)
    fitted(make, lambda: [pruning, Look()], max_epochs=2)
    for now in seen:
        kept = now != 0
        assert not torch.equal(now[kept], first[kept])
        assert now.abs().max() <= 8**-0.5  # The range that a linear layer of 8 draws from.
    assert not torch.equal(seen[0], seen[1])


@pytest.mark.parametrize("permanent", [True, False])
@pytest.mark.parametrize("lottery", [True, False])
def test_a_resumed_run_goes_on_exactly(tmp_path: Path, permanent: bool, lottery: bool) -> None:
    def callbacks() -> list[L.Callback]:
        return [
            ModelPruning(
                "l1_unstructured",
                amount=0.3,
                use_lottery_ticket_hypothesis=lambda epoch: lottery and epoch == 1,
                make_pruning_permanent=permanent,
            )
        ]

    whole = assert_resumes_exactly(tmp_path, make, callbacks, [3, 6, 8, 12, 17], max_epochs=3)
    assert ("layers.0.weight_orig" in weights(whole)) != permanent


def test_checkpoints_hold_plain_weights_with_zeros(tmp_path: Path) -> None:
    saver = SaveLast(tmp_path / "a.ckpt", 8)
    fitted(make, lambda: [ModelPruning("l1_unstructured", amount=0.5)], saver, max_epochs=2)
    stored = torch.load(saver.path, weights_only=True)["state_dict"]
    assert list(stored) == list(make().state_dict())
    total = sum(value.numel() for value in stored.values())
    assert sum(zeros(stored, name) for name in stored) == total // 2
    assert_same(dict(Classifier.load_from_checkpoint(saver.path).state_dict()), stored)


def test_a_checkpoint_with_masks_evaluates_with_the_callback(tmp_path: Path) -> None:
    def callbacks() -> list[L.Callback]:
        return [ModelPruning("l1_unstructured", amount=0.5, make_pruning_permanent=False)]

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


def test_a_name_that_ends_like_a_mask_is_left_alone(tmp_path: Path) -> None:
    class Odd(Classifier):
        def __init__(self) -> None:
            super().__init__(width=6)
            self.register_buffer("own_mask", torch.ones(2))
            self.register_buffer("own_orig2", torch.ones(2))

    saver = SaveAt(tmp_path / "a.ckpt", 2)
    fitted(Odd, lambda: [ModelPruning("l1_unstructured", amount=0.5)], saver)
    assert {"own_mask", "own_orig2"} <= set(torch.load(saver.path, weights_only=True)["state_dict"])


def test_pruning_after_validation_or_not_at_all() -> None:
    sums: list[int] = []

    class Look(L.Callback):
        def on_validation_end(self, trainer: Any, module: Any) -> None:
            sums.append(int((module.layers[0].weight == 0).sum()))

    def callbacks() -> list[L.Callback]:
        return [
            ModelPruning(
                "random_unstructured", amount=10, parameter_names=["weight"], prune_on_train_epoch_end=False
            ),
            Look(),
        ]

    trainer = fitted(make, callbacks, validation=loader(4), max_epochs=2)
    assert len(sums) == 2
    assert zeros(weights(trainer), "layers.0.weight") + zeros(weights(trainer), "layers.3.weight") == 20
    trainer.validate(trainer.lightning_module, loader(4), verbose=False)
    assert zeros(weights(trainer), "layers.0.weight") + zeros(weights(trainer), "layers.3.weight") == 20

    without: list[dict[str, Any]] = [
        {"apply_pruning": False},
        {"apply_pruning": lambda epoch: epoch > 5},
        {"amount": 0.0},
    ]
    for options in without:
        pruning = ModelPruning("l1_unstructured", **options)
        L.seed_everything(0, verbose=False)
        model = make()
        quiet(callbacks=[pruning]).fit(model, loader(8))
        assert zeros(model, "layers.0.weight") == 0


def test_the_sanity_check_does_not_prune() -> None:
    class Look(L.Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            assert not hasattr(module.layers[0], "weight_mask")

    pruning = ModelPruning("l1_unstructured", prune_on_train_epoch_end=False)
    trainer = quiet(callbacks=[pruning, Look()], num_sanity_val_steps=1, limit_val_batches=1)
    trainer.fit(make(), loader(4), loader(4))


def test_an_epoch_that_is_cut_short_does_not_prune() -> None:
    trainer = fitted(make, lambda: [ModelPruning("l1_unstructured", amount=0.5)], max_steps=4)
    assert zeros(weights(trainer), "layers.0.weight") == 0


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
    pruning = Filtering(Largest, parameters_to_prune=[(model.layers[3], "weight"), (model.layers[3], "bias")])
    trainer = fitted(lambda: model, lambda: [pruning], max_epochs=3)
    found = weights(trainer)
    assert zeros(found, "layers.3.weight") == 3
    assert zeros(found, "layers.3.bias") == zeros(found, "layers.0.weight") == 0


def test_what_is_pruned_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        fitted(
            make,
            lambda: [ModelPruning("l1_unstructured", parameter_names=["bias"], amount=4, verbose=2)],
            max_epochs=2,
        )
    text = [record.message for record in caplog.records]
    assert "L1Unstructured, amount=4: 0/8 (0.00%) -> 4/8 (50.00%) pruned" in text
    assert "L1Unstructured, amount=4: 4/8 (50.00%) -> 8/8 (100.00%) pruned" in text
    assert any(line.startswith("  layers.3.bias: ") and line.endswith("-> 2/2 (100.00%)") for line in text)
    caplog.clear()
    with caplog.at_level("INFO"):
        fitted(make, lambda: [ModelPruning("l1_unstructured", amount=4, verbose=1)])
    assert sum("pruned" in record.message for record in caplog.records) == 1
    assert not any("layers.3" in record.message for record in caplog.records)
    caplog.clear()
    with caplog.at_level("INFO"):
        fitted(make, lambda: [ModelPruning("l1_unstructured", amount=4)])
    assert "pruned" not in caplog.text


def test_parameters_that_are_not_there_are_refused() -> None:
    model = make()
    for given, message in (
        ([(nn.Linear(2, 2), "weight")], "the Linear with 'weight' is not part of Classifier"),
        (
            [(model.layers[0], "wight")],
            r"Linear has no parameter 'wight'; it has \['weight', 'bias'\].*weight",
        ),
        ([(model.layers[1], "weight")], "ReLU has no parameter 'weight'"),
        ([("layers", "weight")], r"\('layers', 'weight'\) is not a pair"),
        ([(model.layers[0],)], "is not a pair of a module and a parameter's name"),
        (model.layers[0], "is not a pair"),
    ):
        pruning = ModelPruning("l1_unstructured", parameters_to_prune=given)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=message):
            quiet(callbacks=[pruning]).fit(model, loader(4))

    class Nothing(ModelPruning):
        def filter_parameters_to_prune(self, parameters_to_prune: Any = ()) -> Any:
            return []

    with pytest.raises(ValueError, match=r"Classifier has no parameters called \['weight', 'bias'\]"):
        quiet(callbacks=[Nothing("l1_unstructured")]).fit(model, loader(4))
    assert ModelPruning("l1_unstructured", amount=1).amount == 1
    assert ModelPruning("l1_unstructured", amount=1.0).amount == 1.0

"""``Trainer(compile=...)``: one graph a phase, the same results, and nothing to see from outside."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import hasten as L
from hasten.compile.regions import MAX_HOOK_SETS
from hasten.strategies import SingleDeviceStrategy
from tests.models import loader, quiet, same_weights
from tests.refusals import warned

# Traces as every backend does, and computes with torch's own operations: quick, and equal bit for bit.
TRACED = {"backend": "eager"}


class Net(L.LightningModule):
    """Five values logged a step; what it computes depends on the mode."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.norm(x))

    def loss(self, batch: Any, stage: str) -> Tensor:
        x, y = batch
        out = self(x)
        loss = nn.functional.cross_entropy(out, y)
        self.log(f"{stage}_loss", loss, prog_bar=True)
        for index in range(3):
            self.log(f"{stage}_{index}", out.mean() * index, on_epoch=True)
        self.log_dict({f"{stage}_acc": (out.argmax(1) == y).float().mean()})
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch, "train")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch, "val")

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch, "test")

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Losses(L.Callback):
    """Keeps every training loss."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.values.append(outputs["loss"].item())


def fitted(
    model: L.LightningModule | Callable[[], L.LightningModule] = Net, **arguments: Any
) -> tuple[Any, Any, list[float]]:
    """Train over two epochs, each with a validation and both with a short last batch."""
    L.seed_everything(1, verbose=False)
    module = model if isinstance(model, L.LightningModule) else model()
    losses = Losses()
    trainer = quiet(**{"max_epochs": 2, "callbacks": [losses], "log_every_n_steps": 2, **arguments})
    # Over two processes an even number each: the norm takes no batch of one.
    samples = 42 if trainer.world_size == 1 else 44
    trainer.fit(module, loader(samples), loader(18))
    return module, trainer, losses.values


def fitted_alike(model: Callable[[], L.LightningModule] = Net, **arguments: Any) -> tuple[Any, Any, Any]:
    """Train plainly and compiled, to the same losses and weights; return the compiled module and both Trainers."""
    compiled = {"compile": arguments.pop("compile", TRACED)}
    plain, before, plain_losses = fitted(model, **arguments)
    assert (graphs(), before.compile_report) == (0, None)
    module, trainer, losses = fitted(model, **compiled, **arguments)
    assert losses == plain_losses
    assert same_weights(module, plain)
    return module, trainer, before


def graphs() -> int:
    """Return how many graphs were made."""
    return int(counters["stats"]["unique_graphs"])


def test_two_phases_are_two_graphs_without_a_break_and_results_are_those_of_the_plain_run() -> None:
    module, trainer, before = fitted_alike()
    assert graphs() == 2
    assert not counters["graph_break"]
    assert not counters["recompiles"]
    report = trainer.compile_report
    assert (report.graphs, report.graph_breaks, report.recompiles, report.left) == (2, {}, (), {})
    assert sorted(report.compiled) == ["Net.training_step", "Net.validation_step"]
    assert report.seconds > 0
    assert trainer.callback_metrics == before.callback_metrics
    # The same model again, in other calls and by another Trainer: nothing is compiled twice.
    trainer.validate(module, loader(18), verbose=False)
    fitted(module, compile=TRACED)
    assert graphs() == 2


def test_a_strategy_of_a_later_run_takes_part_in_its_compiled_steps() -> None:
    class Doubled(SingleDeviceStrategy):
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            return 2 * super().training_step(*args, **kwargs)

    module, _, _ = fitted(compile=TRACED, max_epochs=1)
    plain = copy.deepcopy(module)
    for strategy in (Doubled(), "auto"):
        _, _, compiled = fitted(module, compile=TRACED, max_epochs=1, strategy=strategy)
        _, _, losses = fitted(plain, max_epochs=1, strategy=strategy)
        assert compiled == losses


def test_a_compiled_model_looks_like_itself_during_and_after_the_run() -> None:
    class Look(L.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *rest: Any) -> None:
            assert list(module.state_dict()) == keys
            assert type(module) is Net
            assert type(module.net) is nn.Sequential
            clone = copy.deepcopy(module.net)
            assert clone._compiled_call_impl is None

    keys = list(Net().state_dict())
    module, _, _ = fitted(compile=TRACED, callbacks=[Losses(), Look()], max_epochs=1)
    assert all(part._compiled_call_impl is None for part in module.modules())
    assert "log" not in vars(module)
    assert "forward" not in vars(module)
    assert list(module.state_dict()) == keys
    assert same_weights(pickle.loads(pickle.dumps(module.net)), module.net)
    copy.deepcopy(module)
    kept = weakref.ref(module.net)
    del module
    gc.collect()
    assert kept() is None


def test_checkpoints_of_compiled_and_plain_runs_are_interchangeable_at_any_batch(tmp_path: Any) -> None:
    whole, _, _ = fitted()
    compiled = {"compile": TRACED}
    for stop, first, second in (
        ({"max_epochs": 1}, {}, compiled),
        ({"max_epochs": 1}, compiled, {}),
        ({"max_steps": 5}, compiled, compiled),
    ):
        saved, trainer, _ = fitted(**stop, **first)
        trainer.save_checkpoint(tmp_path / "a.ckpt")
        module = Net()
        quiet(max_epochs=2, **second).fit(module, loader(42), loader(18), ckpt_path=tmp_path / "a.ckpt")
        assert same_weights(module, whole)
        assert same_weights(Net.load_from_checkpoint(tmp_path / "a.ckpt"), saved)
        assert list(torch.load(tmp_path / "a.ckpt", weights_only=False)["state_dict"]) == list(Net().state_dict())


def test_all_four_calls_are_compiled() -> None:
    module, trainer, _ = fitted(compile=TRACED, max_epochs=1)
    plain, other, _ = fitted(max_epochs=1)
    assert trainer.test(module, loader(18), verbose=False) == other.test(plain, loader(18), verbose=False)
    predicted, expected = trainer.predict(module, loader(18)), other.predict(plain, loader(18))
    assert all(torch.equal(a, b) for a, b in zip(predicted, expected, strict=True))
    assert graphs() == 4
    assert trainer.compile_report.compiled[-1] == "Net.predict_step"


def test_accumulation_micro_batches_and_mixed_precision() -> None:
    options = {"accumulate_grad_batches": 3, "precision": "bf16-mixed", "max_epochs": 1}
    _, trainer, _ = fitted_alike(**options)
    assert graphs() == 2
    assert not trainer.compile_report.recompiles


class Manual(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss := self.loss(batch, "train"))
        optimizer.step()
        return loss


class Indexed(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch, "train")
        return loss * 2 if batch_idx % 2 else loss


class Printing(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch, "train")
        assert loss.item() < 1e9
        return loss


@pytest.mark.parametrize("kind", [Manual, Indexed, Printing])
def test_a_step_that_cannot_be_one_graph_stays_python_and_its_forward_is_one(kind: type[Net]) -> None:
    report = fitted_alike(kind)[1].compile_report
    assert kind.__name__ in report.compiled
    assert (report.graphs, report.recompiles) == (2, ())
    if kind is Printing:
        assert ".item()" in report.left["Printing.training_step"]
    if kind is Indexed:
        assert "batch_idx" in report.left["Indexed.training_step"]


def test_a_step_that_changes_each_time_is_left_to_python_and_said() -> None:
    class Counting(Net):
        seen = 0

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.outputs = [*getattr(self, "outputs", []), 1]
            return self.loss(batch, "train") * len(self.outputs)

    with warned(UserWarning, fix="out of forward and of the step") as caught:
        _, trainer, _ = fitted_alike(Counting, max_epochs=1)
    said = [str(warning.message) for warning in caught]
    assert any("a graph was made again" in text and "outputs" in text for text in said)
    assert any("Counting.training_step stays Python" in text and "outputs" in text for text in said)
    assert not any("batching=" in text for text in said)
    assert trainer.compile_report.recompiles


@pytest.mark.parametrize("place", ["step", "forward"])
def test_an_error_of_the_model_is_shown_as_its_own(place: str) -> None:
    class Wrong(Net):
        def forward(self, x: Tensor) -> Tensor:
            if place == "forward":
                raise LookupError("mine, in forward")
            return super().forward(x)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, _y = batch
            return self.net(x @ torch.ones(9, 8)).sum() if place == "step" else self.loss(batch, "train")

    module = Wrong()
    with pytest.raises((LookupError, RuntimeError)) as caught:
        fitted(module, compile=TRACED, num_sanity_val_steps=0)
    with pytest.raises((LookupError, RuntimeError)) as plain:
        fitted(Wrong, num_sanity_val_steps=0)
    assert type(caught.value) is type(plain.value)
    assert str(caught.value).split("\n")[0] == str(plain.value).split("\n")[0]
    assert getattr(caught.value, "__notes__", None) == getattr(plain.value, "__notes__", None)
    lines = [str(entry.path) for entry in caught.traceback]
    assert lines[-1].endswith(("test_compile.py", "linear.py")) or any("test_compile" in line for line in lines[5:])
    assert module.net._compiled_call_impl is None


def test_a_part_that_the_backend_cannot_compile_stays_python_with_a_warning() -> None:
    def broken(graph: Any, example_inputs: Any) -> Any:
        raise ValueError("missing kernel")

    with warned(UserWarning, says="missing kernel"):
        _, trainer, _ = fitted_alike(compile={"backend": broken}, max_epochs=1)
    assert trainer.compile_report.compiled == ()


def test_a_graph_break_is_reported_with_its_cause() -> None:
    class Breaking(Net):
        def forward(self, x: Tensor) -> Tensor:
            torch._dynamo.graph_break()
            return super().forward(x)

    report = fitted(Breaking, compile=TRACED, max_epochs=1)[1].compile_report
    assert "graph_break" in " ".join(report.graph_breaks)
    assert "Graph break: " in report.line()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.inner(x))


class Deep(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.net = nn.Sequential(nn.Linear(8, 16), *self.blocks, nn.Linear(16, 2))


def test_regional_compiles_repeated_blocks_once() -> None:
    report = fitted_alike(Deep, compile={**TRACED, "regional": True}, max_epochs=1)[1].compile_report
    assert report.compiled == ("Block",)
    assert (report.graphs, report.recompiles) == (2, ())


class Hooked(L.Callback):
    """Adds a hook in the middle of each epoch but the first, and removes it when the epoch ends."""

    def __init__(self, part_of: Callable[[Any], nn.Module], kind: str) -> None:
        self.part_of, self.kind = part_of, kind
        self.handle: Any = None

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch and batch_idx == 2:
            part = self.part_of(module)
            if self.kind == "forward":
                self.handle = part.register_forward_hook(lambda part, args, output: output * 2)
            elif self.kind == "forward_pre":
                self.handle = part.register_forward_pre_hook(lambda part, args: (args[0] * 2,))
            else:
                self.handle = part.register_full_backward_hook(
                    lambda part, inputs, outputs: tuple(None if one is None else one * 2 for one in inputs)
                )

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        if self.handle is not None:
            self.handle.remove()


@pytest.mark.parametrize(
    ("make", "options", "part_of", "kind"),
    [
        (Net, {}, lambda module: module.net[3], "forward"),
        (Manual, {}, lambda module: module.net, "forward_pre"),
        (Deep, {"regional": True}, lambda module: module.blocks[2], "backward"),
    ],
    ids=["step", "parts", "regional"],
)
def test_hooks_added_and_removed_in_the_middle_of_a_run_are_heard(
    make: Any, options: Any, part_of: Any, kind: str
) -> None:
    runs = []
    for arguments in ({}, {"compile": {**TRACED, **options}}):
        losses = Losses()
        hooked = Hooked(part_of, kind)
        runs.append(fitted(make, max_epochs=3, limit_train_batches=4, callbacks=[losses, hooked], **arguments)[0])
    assert same_weights(*runs)


def test_hooks_that_change_all_the_time_are_heard_without_a_graph_for_each() -> None:
    heard: list[int] = []

    class Registers(L.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            self.handle = module.net[0].register_forward_hook(lambda *_: heard.append(batch_idx))

        def on_train_batch_end(self, *_: Any) -> None:
            self.handle.remove()

    fitted(compile=TRACED, max_epochs=1, limit_val_batches=0, callbacks=Registers())
    assert heard == list(range(11))
    assert graphs() == MAX_HOOK_SETS


def test_a_module_compiled_by_the_user_is_trained_compiled() -> None:
    plain, _, _ = fitted(max_epochs=1)
    L.seed_everything(1, verbose=False)
    module = Net()
    quiet().fit(torch.compile(module, backend="eager"), loader(42), loader(18))
    assert graphs() == 2
    assert same_weights(module, plain)
    # Given as it is, it is not.
    torch._dynamo.reset()
    quiet().fit(module, loader(42), loader(18))
    assert graphs() == 2


def test_two_dataloaders_and_a_first_batch_of_another_size() -> None:
    class Two(Net):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.loss(batch, "val")

    loaders = [loader(18), loader(15, batch_size=6)]
    plain, before, _ = fitted(Two, max_epochs=1)
    module, trainer, _ = fitted(Two, max_epochs=1, compile=TRACED)
    expected = before.validate(plain, loaders, verbose=False)
    assert trainer.validate(module, loaders, verbose=False) == expected
    # The sizes of a loader's batches are one graph's; the index that comes with two loaders makes another.
    assert graphs() == 3
    assert not trainer.compile_report.recompiles


def test_a_last_batch_of_one_sample_needs_no_graph() -> None:
    class Free(Net):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(8)  # type: ignore[assignment]

    modules = []
    for compile in (None, TRACED):
        L.seed_everything(1, verbose=False)
        modules.append(Free())
        trainer = quiet(compile=compile)
        trainer.fit(modules[-1], loader(9), loader(5))
    assert same_weights(*modules)
    report = trainer.compile_report
    assert (graphs(), report.compiled) == (2, ("Free.validation_step", "Free.training_step"))


class Passing(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.shared(batch, batch_idx, stage="train")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.shared(batch, batch_idx, stage="val")

    def shared(self, batch: Any, number: int, stage: str) -> Tensor:
        return self.loss(batch, stage)


class Inheriting(Passing):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("make", [Passing, Inheriting])
def test_an_index_that_is_only_passed_on_needs_no_other_graph(make: type[Net]) -> None:
    report = fitted_alike(make)[1].compile_report
    assert (report.graphs, report.recompiles, report.left) == (2, (), {})


def test_batches_of_other_shapes_are_told_to_be_padded() -> None:
    class Texts(Net):
        def loss(self, batch: Any, stage: str) -> Tensor:
            return self.net(batch.sum(1)).mean()

    module = Texts()
    texts = [torch.ones(4, width, 8) for width in (3, 5, 7)]
    with warned(UserWarning, fix="batching='length'"):
        quiet(max_epochs=1, compile=TRACED).fit(module, texts)


class Attending(Net):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.first, self.encoder = nn.Linear(8, 8), nn.TransformerEncoder(layer, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.net[3](self.encoder(self.first(x).unsqueeze(1)).squeeze(1).repeat(1, 2))


@pytest.mark.parametrize("regional", [False, True])
def test_transformer_layers_evaluate_under_autocast(regional: bool) -> None:
    losses = []
    for compile in (None, {"backend": "aot_eager", "regional": regional}):
        trainer = fitted(Attending, precision="bf16-mixed", max_epochs=1, compile=compile)[1]
        losses.append(trainer.callback_metrics["val_loss"].item())
    assert losses[1] == pytest.approx(losses[0], rel=0.02)
    assert trainer.compile_report.left == {}
    assert torch.backends.mha.get_fastpath_enabled()

"""Fabric in one process: a loop of one's own, unchanged but for three lines."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, TensorDataset

import hasten as L
from hasten.fabric import is_wrapped
from hasten.fabric.wrappers import FabricDataLoader, FabricModule, FabricOptimizer
from hasten.plugins import MixedPrecision
from tests.models import quiet
from tests.programs import fork_python
from tests.refusals import refused, warned


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.1))
        self.head = nn.Linear(8, 1)
        self.register_buffer("calls", torch.zeros(1))
        self.shared = self.head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))

    def loss(self, x: Tensor, weight: float = 1.0) -> Tensor:
        return self(x).pow(2).mean() * weight

    @property
    def width(self) -> int:
        return 8


@pytest.fixture
def fabric() -> L.Fabric:
    return L.Fabric(accelerator="cpu")


def loader(**options: Any) -> DataLoader[Any]:
    data = torch.randn(24, 4, generator=torch.Generator().manual_seed(3))
    return DataLoader(TensorDataset(data), batch_size=4, **options)


# -- the loop


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("clip", [{}, {"max_norm": 0.1}, {"clip_val": 0.01}], ids=["", "norm", "value"])
def test_weights_equal_the_plain_loops(fabric: L.Fabric, accumulate: int, clip: dict[str, float]) -> None:
    plain, mine = Model(), Model()
    plain_optimizer, my_optimizer = (torch.optim.AdamW(m.parameters(), lr=0.01) for m in (plain, mine))
    schedule = torch.optim.lr_scheduler.StepLR(plain_optimizer, 2)

    torch.manual_seed(7)
    for i, (x,) in enumerate(loader(shuffle=True)):
        (plain(x).pow(2).mean() / accumulate).backward()
        if (i + 1) % accumulate == 0:
            if "max_norm" in clip:
                nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
            elif clip:
                nn.utils.clip_grad_value_(plain.parameters(), 0.01)
            plain_optimizer.step()
            plain_optimizer.zero_grad()
            schedule.step()

    fabric.launch()
    model, optimizer = fabric.setup(mine, my_optimizer)
    batches = fabric.setup_dataloaders(loader(shuffle=True))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    torch.manual_seed(7)
    for i, (x,) in enumerate(batches):
        complete = (i + 1) % accumulate == 0
        with fabric.no_backward_sync(model, enabled=not complete):
            fabric.backward(model(x).pow(2).mean() / accumulate)
        if complete:
            if clip:
                fabric.clip_gradients(model, optimizer, **clip)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), mine.parameters(), strict=True))
    assert optimizer.param_groups[0]["lr"] == plain_optimizer.param_groups[0]["lr"]


def test_lbfgs_gets_its_closure(fabric: L.Fabric) -> None:
    module = nn.Linear(4, 1)
    model, optimizer = fabric.setup(module, torch.optim.LBFGS(module.parameters(), max_iter=5))
    x = torch.ones(3, 4)
    losses: list[float] = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        fabric.backward(loss)
        losses.append(loss.item())
        return loss

    assert optimizer.step(closure).item() == losses[0]
    assert len(losses) > 1
    assert losses[-1] < losses[0]


# -- what setup returns


def test_setup_returns_what_it_was_given(fabric: L.Fabric) -> None:
    module = Model()
    assert isinstance(fabric.setup(Model()), FabricModule)
    assert isinstance(fabric.setup_module(Model()), FabricModule)
    first, second = torch.optim.SGD(module.parameters(), lr=1.0), torch.optim.Adam(module.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(first, 1, gamma=0.5)
    model, a, b, same = fabric.setup(module, first, second, scheduler=schedule)
    assert same is schedule
    fabric.backward(model(torch.ones(1, 4)).sum())
    a.step()
    # A scheduler made before setup goes on.
    same.step()
    assert a.param_groups[0]["lr"] == 0.5
    assert (type(a).__name__, type(b).__name__) == ("FabricSGD", "FabricAdam")
    assert isinstance(a, torch.optim.SGD)
    assert isinstance(b, torch.optim.Adam)
    assert (model.module, a.optimizer, b.optimizer) == (module, first, second)
    assert isinstance(fabric.setup_optimizers(torch.optim.SGD(module.parameters(), lr=1)), FabricOptimizer)
    several = fabric.setup_optimizers(*(torch.optim.SGD(module.parameters(), lr=1) for _ in range(2)))
    assert isinstance(several, tuple)
    assert isinstance(fabric.setup_dataloaders(loader()), FabricDataLoader)
    assert isinstance(fabric.setup_dataloaders(loader(), loader()), list)
    assert all(map(is_wrapped, (model, a, fabric.setup_dataloaders(loader()))))
    assert not any(map(is_wrapped, (module, first, loader(), 3)))


def test_a_wrapped_module_is_the_users_module_to_all_who_look(fabric: L.Fabric) -> None:
    module = Model()
    model = fabric.setup(module)
    assert isinstance(model, nn.Module)
    for members in ("named_parameters", "named_buffers", "named_modules", "named_children"):
        mine, theirs = getattr(model, members)(), getattr(module, members)()
        assert [(name, id(value)) for name, value in mine] == [(name, id(value)) for name, value in theirs]
    assert list(model.state_dict()) == list(module.state_dict())
    assert model.width == 8
    assert model.head is module.head
    assert model.device == torch.device("cpu")
    assert "width" in dir(model)
    assert "Model" in repr(model)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        model.nothing


def test_modes_and_changes_reach_the_users_module(fabric: L.Fabric) -> None:
    module = Model()
    model = fabric.setup(module)
    assert model.eval() is model
    assert not any(part.training for part in module.modules())
    assert model.train().training
    assert module.body.training
    module.eval()
    assert not model.training
    model.load_state_dict({**Model().state_dict(), "calls": torch.ones(1)})
    assert module.calls.item() == 1
    model.extra = 3
    assert module.extra == 3  # type: ignore[comparison-overlap]
    model.head = nn.Linear(8, 2)
    assert model(torch.ones(1, 4)).shape == (1, 2)
    del model.extra
    assert not hasattr(module, "extra")
    model.requires_grad_(False)
    assert not any(parameter.requires_grad for parameter in module.parameters())
    model.double()
    assert module.head.weight.dtype == torch.float64
    kinds: list[type] = []
    model.apply(lambda part: kinds.append(type(part)))
    assert Model in kinds
    assert FabricModule not in kinds


def test_hooks_on_the_wrapped_module_run(fabric: L.Fabric) -> None:
    model = fabric.setup(Model())
    seen: list[str] = []
    handles = [
        model.register_forward_pre_hook(lambda module, args: seen.append("before")),
        model.register_forward_hook(lambda module, args, output: seen.append("after")),
        model.module.register_forward_hook(lambda module, args, output: seen.append("inside")),
    ]
    model(torch.ones(1, 4))
    assert seen == ["before", "inside", "after"]
    for handle in handles:
        handle.remove()
    model(torch.ones(1, 4))
    assert len(seen) == 3
    assert model.forward(torch.ones(1, 4)).shape == (1, 1)
    model.register_full_backward_hook(lambda module, inputs, outputs: seen.append("backward"))
    fabric.backward(model(torch.ones(1, 4)).sum())
    assert seen[3:] == ["backward"]
    assert not model.module._backward_hooks


def test_a_scripted_module_is_a_module_too(fabric: L.Fabric) -> None:
    module = torch.jit.trace(nn.Linear(2, 1), torch.ones(1, 2))
    model = fabric.setup(module)
    fabric.backward(model(torch.ones(1, 2)).sum())
    assert [name for name, _ in model.named_parameters()] == ["weight", "bias"]


def test_a_module_that_the_program_has_let_go_of_is_gone(fabric: L.Fabric) -> None:
    module = nn.Linear(2, 1)
    model, kept = fabric.setup_module(module), weakref.ref(module)
    del module, model
    fabric.setup_module(nn.Linear(2, 1))  # A strategy knows the one that it trains.
    gc.collect()
    assert kept() is None


def test_a_lightning_module_logs_and_steps_through_fabric() -> None:
    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            loss = self.layer(batch).pow(2).mean()
            self.log("loss", loss)
            self.log_dict({"one": 1, "two": 2})
            self.log_dict({"three": 3}, logger=False)
            return loss

        def on_epoch_end_of_mine(self) -> None:
            self.called = True

        def configure_optimizers(self) -> None:
            """For a Trainer, which it is trained by before."""

    notes = Notes()
    fabric = L.Fabric(accelerator="cpu", loggers=notes)
    module = Module()
    quiet(max_steps=1).fit(module, [torch.ones(2, 4)])
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    assert module.fabric is fabric
    loss = model.training_step(torch.ones(2, 4), 0)
    fabric.backward(loss)
    optimizer.step()
    fabric.call("on_epoch_end_of_mine")
    assert module.called
    assert notes.seen == [({"loss": loss.item()}, None), ({"one": 1, "two": 2}, None)]
    assert (module.trainer.world_size, module.trainer.device) == (1, fabric.device)
    with refused(AttributeError, says="self.trainer.current_epoch"):
        module.trainer.current_epoch
    module.clip_gradients(optimizer, 0.1, "NORM")
    assert torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in module.parameters()])) <= 0.1001
    module.clip_gradients(optimizer, 0.01, "value")
    assert max(p.grad.abs().max() for p in module.parameters()) <= 0.01
    other = Module()
    _, of_other = fabric.setup(other, torch.optim.SGD(other.parameters(), lr=0.1))
    assert module.optimizers() is optimizer
    assert other.optimizers() is of_other


def test_a_wrapped_module_can_be_copied_and_sent(fabric: L.Fabric) -> None:
    model = fabric.setup(Model())
    model.eval()
    x = torch.ones(2, 4)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(x), model(x))
        with torch.no_grad():
            twin.head.weight.zero_()
        assert not torch.equal(twin(x), model(x))


def test_a_wrapped_optimizer_is_the_users_optimizer_to_all_who_look(fabric: L.Fabric) -> None:
    module = Model()
    inner = torch.optim.SGD(module.body.parameters(), lr=0.1, momentum=0.9)
    _, optimizer = fabric.setup(module, inner)
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state is inner.state
    optimizer.add_param_group({"params": list(module.head.parameters())})
    assert len(inner.param_groups) == 2
    optimizer.param_groups[0]["lr"] = 0.5
    state = optimizer.state_dict()
    assert state["param_groups"][0]["lr"] == inner.state_dict()["param_groups"][0]["lr"] == 0.5
    inner.param_groups[0]["lr"] = 0.1
    optimizer.load_state_dict(state)
    assert inner.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] == 0.5
    seen: list[int] = []
    optimizer.register_step_post_hook(lambda *_: seen.append(1))
    optimizer.step()
    assert seen == [1]
    assert "SGD" in repr(optimizer)
    (parameter,) = optimizer.param_groups[1]["params"][:1]
    parameter.grad = torch.ones_like(parameter)
    optimizer.zero_grad(set_to_none=False)
    assert parameter.grad is not None
    optimizer.zero_grad()
    assert parameter.grad is None


def test_a_compiled_module_stays_compiled_and_its_names_clean(fabric: L.Fabric) -> None:
    counted: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        counted.append(1)
        return graph

    module = nn.Sequential(nn.Linear(4, 2))
    model = fabric.setup(torch.compile(module, backend=backend))
    assert model(torch.ones(1, 4)).shape == (1, 2)
    assert counted
    assert list(model.state_dict()) == ["0.weight", "0.bias"]
    assert model.module is module


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
def test_outputs_of_modules_and_marked_methods_come_in_full_precision(precision: str) -> None:
    model = L.Fabric(accelerator="cpu", precision=precision).setup(Model())
    model.mark_forward_method("loss")
    assert model(torch.ones(1, 4, dtype=torch.float64)).dtype == torch.float32
    assert model.loss(torch.ones(2, 4), weight=2.0).dtype == torch.float32
    expected = {"bf16-true": torch.bfloat16, "64-true": torch.float64}.get(precision, torch.float32)
    assert model.head.weight.dtype == expected


def test_scaled_gradients_that_no_optimizer_divides_are_warned_of() -> None:
    precision = MixedPrecision("16-mixed", "cuda", torch.amp.GradScaler("cpu"))
    precision.device = "cpu"
    fabric = L.Fabric(accelerator="cpu", plugins=precision)
    model = fabric.setup(nn.Linear(4, 1))
    with warned(UserWarning, fix="fabric.setup(model, optimizer)", says="divides them by the scale"):
        fabric.backward(model(torch.ones(1, 4)).sum())
    fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fabric.backward(model(torch.ones(1, 4)).sum())


def test_a_dataset_in_place_of_a_loader_is_told_how_to_wrap_it() -> None:
    with refused(TypeError, fix="DataLoader(dataset, batch_size=...)", says="TensorDataset"):
        L.Fabric(accelerator="cpu").setup_dataloaders(loader().dataset)  # type: ignore[arg-type]


def test_an_unscaled_backward_is_refused_where_a_scaler_is_needed() -> None:
    precision = MixedPrecision("16-mixed", "cuda", torch.amp.GradScaler("cpu", init_scale=4.0))
    precision.device = "cpu"
    fabric = L.Fabric(accelerator="cpu", plugins=precision)
    module = nn.Linear(4, 1)
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    with refused(RuntimeError, fix="fabric.backward(loss)"):
        model(torch.ones(1, 4)).sum().backward()
    optimizer.zero_grad()
    fabric.backward(model(torch.ones(1, 4)).sum())
    assert module.bias.grad is not None
    assert module.bias.grad.item() == 4.0
    norm = fabric.clip_gradients(model, optimizer, max_norm=100.0)
    assert norm is not None
    assert norm.item() == pytest.approx(5**0.5)
    optimizer.step()


# -- loaders


def test_a_loader_is_iterated_as_it_is_and_its_sampler_gets_the_epoch(fabric: L.Fabric) -> None:
    plain = loader(shuffle=True)
    fabric.setup_dataloaders(plain)
    assert type(plain.sampler) is RandomSampler
    plain = loader()
    wrapped = fabric.setup_dataloaders(plain)
    assert len(wrapped) == 6
    assert wrapped.batch_size == 4
    for (a,), (b,) in zip(plain, wrapped, strict=True):
        assert torch.equal(a, b)

    class Noting(DistributedSampler[Any]):
        def set_epoch(self, epoch: int) -> None:
            epochs.append(epoch)
            super().set_epoch(epoch)

    epochs: list[int] = []
    sampler = Noting(plain.dataset, num_replicas=2, rank=0)  # type: ignore[arg-type]
    wrapped = fabric.setup_dataloaders(loader(sampler=sampler))
    orders = [torch.cat([x for (x,) in wrapped]) for _ in range(2)]
    assert epochs == [0, 1]
    assert not torch.equal(orders[0], orders[1])
    # A program that resumes in epoch 1, and goes on with and without saying which epoch it is in.
    sampler = Noting(plain.dataset, num_replicas=2, rank=0)  # type: ignore[arg-type]
    wrapped = fabric.setup_dataloaders(loader(sampler=sampler))
    wrapped.sampler.set_epoch(1)
    assert torch.equal(torch.cat([x for (x,) in wrapped]), orders[1])
    list(wrapped)
    wrapped.sampler.set_epoch(3)
    list(wrapped)
    assert epochs == [0, 1, 1, 1, 2, 3, 3]


# -- files


def test_what_is_saved_is_loaded(fabric: L.Fabric, tmp_path: Path) -> None:
    module = Model()
    model, optimizer = fabric.setup(module, torch.optim.Adam(module.parameters(), lr=0.3))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    fabric.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
    schedule.step()
    state = {"model": model, "optimizer": optimizer, "schedule": schedule, "step": 3, "extra": {"a": [1, 2]}}
    path = tmp_path / "deep" / "a.ckpt"
    fabric.save(path, state)
    assert list(torch.load(path, weights_only=True)["model"]) == list(module.state_dict())

    other = Model()
    with torch.no_grad():
        other.head.weight.zero_()
    twin, twin_optimizer = fabric.setup(other, torch.optim.Adam(other.parameters(), lr=0.1))
    loaded: dict[str, Any] = {"model": twin, "optimizer": twin_optimizer, "step": 0}
    rest = fabric.load(path, loaded)
    assert torch.equal(other.head.weight, module.head.weight)
    assert twin_optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    assert loaded["step"] == 3
    assert loaded["model"] is twin
    assert set(rest) == {"schedule", "extra"}
    assert set(fabric.load(path)) == set(state)


def test_entries_can_be_filtered(fabric: L.Fabric, tmp_path: Path) -> None:
    model = fabric.setup(Model())
    fabric.save(tmp_path / "a.ckpt", {"model": model, "n": 1}, filter={"model": lambda key, value: "head" in key})
    contents = fabric.load(tmp_path / "a.ckpt")
    assert contents["n"] == 1
    assert set(contents["model"]) == {"head.weight", "head.bias"}
    with pytest.raises(RuntimeError, match="Missing key"):
        fabric.load(tmp_path / "a.ckpt", {"model": model})
    assert fabric.load(tmp_path / "a.ckpt", {"model": model, "m": 2}, strict=False) == {"n": 1}
    with warned(UserWarning, says=("'net'", "nothing is loaded", "'model', 'n'"), fix="in state"):
        fabric.load(tmp_path / "a.ckpt", {"net": model}, strict=False)
    with refused(TypeError, "obj", fix="fabric.load(path, state)"):
        fabric.load_raw(tmp_path / "a.ckpt", {"model": model})  # type: ignore[arg-type]
    with refused(KeyError, fix="'model'"):
        fabric.load(tmp_path / "a.ckpt", {"modle": Model()})


def test_bare_states_of_modules_and_optimizers(fabric: L.Fabric, tmp_path: Path) -> None:
    module = Model()
    torch.save(module.state_dict(), tmp_path / "model.pt")
    torch.save(torch.optim.SGD(module.parameters(), lr=0.7).state_dict(), tmp_path / "optimizer.pt")
    other = Model()
    with torch.no_grad():
        other.head.bias.fill_(9.0)
    model, optimizer = fabric.setup(other, torch.optim.SGD(other.parameters(), lr=0.1))
    fabric.load_raw(tmp_path / "model.pt", model)
    fabric.load_raw(tmp_path / "optimizer.pt", optimizer)
    assert torch.equal(other.head.bias, module.head.bias)
    assert optimizer.param_groups[0]["lr"] == 0.7


# -- callbacks and loggers


class Notes:
    """A callback and a logger that notes what it gets."""

    not_a_method = 3

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_epoch_end(self, epoch: int, *, loss: float = 0.0) -> None:
        self.seen.append((epoch, loss))

    def on_anything(self, **kwargs: Any) -> None:
        self.seen.append(kwargs)

    def on_after_setup(self, fabric: Any, module: Any) -> None:
        self.seen.append(type(module).__name__)

    def on_after_optimizer_step(self, strategy: Any, optimizer: Any) -> None:
        self.seen.append(type(optimizer).__name__)

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self.seen.append((metrics, step))


def test_callbacks_are_called_with_what_they_take() -> None:
    notes = Notes()
    fabric = L.Fabric(accelerator="cpu", callbacks=[notes, object()])
    fabric.call("on_epoch_end", 1, loss=0.5, not_taken=3)
    fabric.call("on_anything", a=1, b=2)
    fabric.call("on_nothing_at_all")
    with warned(UserWarning, says="Notes.not_a_method"):
        fabric.call("not_a_method")
    module = nn.Linear(1, 1)
    _, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    optimizer.step()
    assert notes.seen == [(1, 0.5), {"a": 1, "b": 2}, "FabricModule", "SGD"]


def test_a_misspelt_method_of_a_callback_is_answered_by_the_nearest() -> None:
    fabric = L.Fabric(accelerator="cpu", callbacks=[L.Callback(), object()])
    with warned(UserWarning, fix="'on_train_start'", says="on_train_strat"):
        fabric.call("on_train_strat")
    fabric.call("on_train_step_start")


LOOP = """
import torch, hasten

def train(clear):
    fabric, model = hasten.Fabric(accelerator="cpu"), torch.nn.Linear(4, 1)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(3):
        fabric.backward(model(torch.ones(2, 4)).sum())
        optimizer.step()
        clear(model)

def by_data(model):
    for parameter in model.parameters():
        parameter.grad.data.CLEAR()

def by_none(model):
    for parameter in model.parameters():
        parameter.grad = None

for clear in (by_none, by_data, lambda model: None):
    train(clear)
"""


def test_a_loop_that_never_sets_gradients_to_zero_is_told_so(tmp_path: Path) -> None:
    said = "Call optimizer.zero_grad() before fabric.backward(loss)."
    program = tmp_path / "train.py"
    for clear, times in (("abs_", 1), ("zero_", 0)):
        program.write_text(LOOP.replace("CLEAR", clear))
        assert fork_python(program).stderr.count(said) == times


def test_values_reach_every_logger_as_numbers(fabric: L.Fabric) -> None:
    first, second = Notes(), Notes()
    fabric = L.Fabric(accelerator="cpu", loggers=[first, second])
    assert fabric.loggers == [first, second]
    assert fabric.logger is first
    fabric.log("loss", torch.tensor(0.5))
    fabric.log_dict({"a": torch.tensor([1]), "b": 2}, step=4)
    assert first.seen == second.seen == [({"loss": 0.5}, None), ({"a": 1, "b": 2}, 4)]
    fabric.log_dict({"nested": {"a": torch.tensor(2.0)}, "list": [torch.tensor(1), "b"], "text": "c"})
    assert first.seen[-1] == ({"nested": {"a": 2.0}, "list": [1, "b"], "text": "c"}, None)


# -- the other verbs


def test_collectives_of_one_process_return_their_input(fabric: L.Fabric) -> None:
    assert (fabric.world_size, fabric.global_rank, fabric.local_rank, fabric.node_rank) == (1, 0, 0, 0)
    assert fabric.is_global_zero
    assert fabric.all_gather({"a": 1.5, "b": [torch.ones(2)]})["a"].item() == 1.5
    assert fabric.all_reduce(3, reduce_op="sum").item() == 3
    assert fabric.broadcast("x") == "x"
    fabric.barrier()
    with fabric.rank_zero_first():
        pass


def test_modules_and_tensors_go_to_the_device(fabric: L.Fabric, capsys: pytest.CaptureFixture[str]) -> None:
    batch = {"x": torch.ones(1)}
    assert fabric.to_device(batch) is batch
    module = nn.Linear(1, 1)
    assert fabric.to_device(module) is module
    model = fabric.setup(module)
    assert (model.dtype, model.double().dtype, model.device) == (torch.float32, torch.float64, fabric.device)
    fabric.print("hello", end="!")
    assert capsys.readouterr().out == "hello!"
    with L.Fabric(accelerator="cpu", precision="bf16-mixed").autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16


class MadeEmpty(L.LightningModule):
    """Draws values twice for a weight, and sets some by other means."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3, padding_idx=1)
        self.layer = nn.Linear(3, 2)
        nn.init.normal_(self.layer.weight, std=0.02)
        self.last = nn.Linear(2, 2)
        self.last.bias.data.zero_()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.last(self.layer(self.embedding(batch[0]))).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


@pytest.mark.parametrize("by", ["Fabric.setup", "Trainer.fit"])
def test_what_no_checkpoint_brings_gets_its_initial_values(by: str, fabric: L.Fabric) -> None:
    def begin(model: MadeEmpty) -> None:
        if by == "Fabric.setup":
            fabric.setup(model)
        else:
            quiet(max_steps=1).fit(model, DataLoader(TensorDataset(torch.tensor([[0, 1]]))))

    torch.manual_seed(0)
    expected = MadeEmpty().state_dict()
    with (fabric if by == "Fabric.setup" else quiet()).init_module(empty_init=True):
        model, loaded, in_part = MadeEmpty(), MadeEmpty(), MadeEmpty()
    torch.manual_seed(0)
    begin(model)
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    loaded.load_state_dict({name: torch.full_like(value, 7.0) for name, value in expected.items()})
    begin(loaded)
    assert all(bool((value == 7).all()) for value in loaded.state_dict().values())
    in_part.load_state_dict({"layer.weight": torch.full((2, 3), 7.0)}, strict=False)
    begin(in_part)
    assert bool((in_part.layer.weight == 7).all())
    assert bool(in_part.last.weight.isfinite().all())


def test_modules_made_empty_draw_no_values(fabric: L.Fabric, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[int] = []
    monkeypatch.setattr(Tensor, "uniform_", lambda tensor, *args, **kwargs: called.append(1) or tensor)
    with fabric.init_module(empty_init=True):
        assert nn.Linear(3, 2).weight.shape == (2, 3)
    assert not called
    with fabric.init_module():
        nn.Linear(3, 2)
    assert called


def test_launch_calls_a_function_or_the_run_of_a_subclass_with_the_fabric(fabric: L.Fabric) -> None:
    assert fabric.launch(lambda given, a, b=0: (given is fabric, a + b), 2, b=3) == (True, 5)
    assert L.Fabric.seed_everything(3, verbose=False) == 3

    class Mine(L.Fabric):
        def run(self, factor: int) -> tuple[int, bool]:
            return 2 * factor, self._launched

    class Theirs(Mine):
        def run(self, factor: int) -> tuple[int, bool]:
            return super().run(factor + 1)

    assert Mine(accelerator="cpu").run(4) == (8, True)
    assert Theirs(accelerator="cpu").run(4) == (10, True)


def test_methods_that_are_replaced_on_the_strategy_before_setup_are_called() -> None:
    fabric = L.Fabric(accelerator="cpu", devices=1)
    strategy: Any = fabric.strategy
    called = []
    for name in ("backward", "optimizer_step"):

        def replacement(*args: Any, name: str = name, **kwargs: Any) -> Any:
            called.append(name)
            return getattr(type(strategy), name)(strategy, *args, **kwargs)

        setattr(strategy, name, replacement)
    layer = nn.Linear(2, 1)
    before = layer.weight.detach().clone()
    model, optimizer = fabric.setup(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
    fabric.backward(model(torch.ones(3, 2)).sum())
    optimizer.step()
    assert called == ["backward", "optimizer_step"]
    assert not torch.equal(layer.weight, before)


def test_backward_can_be_overridden() -> None:
    class Mine(L.Fabric):
        calls = 0

        def backward(self, tensor: Tensor, *args: Any, model: Any = None, **kwargs: Any) -> None:
            self.calls += 1
            super().backward(tensor, *args, **kwargs)

    fabric = Mine(accelerator="cpu")
    x = torch.ones(1, requires_grad=True)
    fabric.backward(x.sum())
    assert fabric.calls == 1
    assert x.grad is not None


# -- mistakes


def set_up_twice(fabric: L.Fabric) -> dict[str, Any]:
    module = Model()
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    return {"model": model, "optimizer": optimizer, "loader": fabric.setup_dataloaders(loader())}


@pytest.mark.parametrize(
    ("mistake", "kind", "said"),
    [
        (lambda f, s: f.setup(s["model"]), ValueError, "set up already"),
        (lambda f, s: f.setup(Model(), s["optimizer"]), ValueError, "set up already"),
        (lambda f, s: f.setup_optimizers(s["optimizer"]), ValueError, "set up already"),
        (lambda f, s: f.setup_dataloaders(s["loader"]), ValueError, "set up already"),
        (lambda f, s: f.setup_optimizers(), ValueError, "at least one"),
        (lambda f, s: f.setup_dataloaders(), ValueError, "at least one"),
        (lambda f, s: f.setup_dataloaders([1, 2]), TypeError, "PyTorch DataLoader"),
        (lambda f, s: f.setup(Model), TypeError, r"Write Model\(\)"),
        (lambda f, s: f.setup(Model(), Model()), TypeError, "not an optimizer"),
        (lambda f, s: f.setup(Model(), [s["optimizer"]]), TypeError, r"fabric.setup\(module, \*optimizers\)"),
        (lambda f, s: f.setup(nn.Linear(1, 1, device="meta")), ValueError, "meta device"),
        (lambda f, s: f.setup_optimizers(sgd(nn.Linear(1, 1, device="meta"))), RuntimeError, "module.parameters"),
        (lambda f, s: f.clip_gradients(s["model"], s["optimizer"]), ValueError, "give one of the two"),
        (lambda f, s: f.clip_gradients(s["model"], s["optimizer"], clip_val=1, max_norm=1), ValueError, "give one"),
        (lambda f, s: f.clip_gradients(s["optimizer"], s["model"], max_norm=1), TypeError, "the module comes first"),
        (lambda f, s: f.backward(s["model"]), TypeError, r"backward\(Fabric\[Model\]\(\.\.\.\)\): a FabricModule"),
        (lambda f, s: L.Fabric(gradient_accumulation_steps=2), TypeError, "no_backward_sync"),
        (lambda f, s: f.no_backward_sync(Model()), TypeError, "fabric.setup"),
        (lambda f, s: s["model"].mark_forward_method("forward"), ValueError, "needs no mark"),
        (lambda f, s: s["model"].mark_forward_method("losss"), AttributeError, "Did you mean 'loss'"),
        (lambda f, s: s["model"].mark_forward_method(3), TypeError, "method or its name"),
        (lambda f, s: f.log("loss", torch.ones(2)), ValueError, r"shape \(2,\)"),
        (lambda f, s: f.save("x", s, filter={"modle": print}), ValueError, "Did you mean 'model'"),
        (lambda f, s: f.save("x", s, filter={"model": 3}), TypeError, "a function of"),
        (lambda f, s: f.setup_module(s["model"]), ValueError, "set up already"),
        (lambda f, s: f.setup("model"), TypeError, "not str"),
        (lambda f, s: f.save("x", s, filter=[1]), TypeError, "names and functions"),
        (lambda f, s: f.launch(3), TypeError, "not a function"),
        (lambda f, s: f.launch(lambda: None), TypeError, "must take an argument"),
        (lambda f, s: f.save("x", Model()), TypeError, "use a dict"),
        (lambda f, s: f.save({"model": s["model"]}, "x"), TypeError, r"Write fabric.save\('x', {'model': model}\)"),
        (lambda f, s: f.load(s["model"], "x"), TypeError, r"Write fabric.load\('x', {'model': model}\)"),
        (lambda f, s: f.log_dict("loss", 1.0), TypeError, "names and numbers"),
        (lambda f, s: f.all_reduce(1, reduce_op="summ"), ValueError, "Did you mean 'sum'"),
        (lambda f, s: f.logger, IndexError, "Fabric\\(loggers="),
        (lambda f, s: L.Fabric(acelerator="cpu"), TypeError, "Did you mean 'accelerator'"),
        (lambda f, s: L.Fabric(max_epochs=3), TypeError, "The loop over the epochs is yours"),
        (lambda f, s: L.Fabric(loggers=3), TypeError, "not a logger"),
        (lambda f, s: L.Fabric(accelerator="cpu", precision="fp17"), ValueError, r"Fabric\(precision='fp17'\)"),
    ],
)  # fmt: skip
def test_mistakes_are_named_with_what_to_do(fabric: L.Fabric, mistake: Any, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        mistake(fabric, set_up_twice(fabric))


@pytest.mark.parametrize(
    "use",
    [
        lambda f: f.setup(Model()), lambda f: f.setup_module(Model()), lambda f: f.setup_dataloaders(loader()),
        lambda f: f.setup_optimizers(torch.optim.SGD(Model().parameters(), lr=1)), lambda f: f.barrier(),
        lambda f: f.broadcast(1), lambda f: f.all_gather(1), lambda f: f.all_reduce(1), lambda f: f.init_module(),
        lambda f: f.rank_zero_first().__enter__(),
    ],
)  # fmt: skip
def test_several_processes_must_be_launched_first(use: Any) -> None:
    fabric = L.Fabric(accelerator="cpu", devices=2, strategy="ddp")
    with refused(RuntimeError, fix="fabric.launch()"):
        use(fabric)


def test_copies_need_a_function_to_run() -> None:
    with refused(TypeError, says=("Fabric.launch()", "strategy='ddp_spawn'")):
        L.Fabric(accelerator="cpu", devices=2, strategy="ddp_spawn").launch()


# -- optimizers that train something else


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1)


def test_an_optimizer_of_another_module_is_refused(fabric: L.Fabric) -> None:
    with refused(ValueError, says=("4 of", "SGD", "(Model)")):
        fabric.setup(Model(), sgd(Model()))
    with refused(ValueError, fix="model.parameters()"):
        fabric.setup(model := Model(), sgd(copy.deepcopy(model)))


def test_optimizers_over_parts_several_modules_and_tensors_are_fine(fabric: L.Fabric) -> None:
    generator, critic = Model(), Model()
    fabric.setup(generator, sgd(generator.head), torch.optim.SGD([*generator.parameters(), *critic.parameters()]))
    fabric.setup_module(critic)
    fabric.setup_optimizers(sgd(critic), sgd(nn.ModuleList([generator, critic])))
    image, alone = torch.zeros(3, requires_grad=True), nn.Parameter(torch.zeros(3))
    fabric.setup_optimizers(torch.optim.SGD([image], lr=0.1), torch.optim.SGD([alone], lr=0.1))
    compiled = torch.compile(Model(), backend="eager")
    fabric.setup(compiled, sgd(compiled))


def test_a_fabric_can_be_sent_to_other_processes() -> None:
    sent = pickle.loads(pickle.dumps(L.Fabric(accelerator="cpu")))
    model = sent.setup(nn.Linear(2, 1))
    assert model(torch.ones(1, 2)).shape == (1, 1)


def test_what_is_no_optimizer_and_no_loss_is_told_what_to_do(fabric: L.Fabric) -> None:
    layer = nn.Linear(8, 2)
    sgd = torch.optim.SGD(layer.parameters(), lr=0.1)
    with refused(TypeError, says=("DataLoader", "setup_dataloaders")):
        fabric.setup(layer, sgd, loader())
    with refused(TypeError, fix="module.parameters()"):
        fabric.setup(layer, torch.optim.SGD)
    wrapped, _ = fabric.setup(layer, sgd)
    with pytest.raises(RuntimeError) as caught:
        fabric.backward(wrapped(torch.ones(4, 8)))
    assert "Take its mean" in caught.value.__notes__[0]


def test_a_loop_whose_module_was_never_set_up_is_told_so(fabric: L.Fabric, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hasten._lib.rank_zero._warned", {})
    layer = nn.Linear(8, 2)
    with warned(UserWarning, says="setup(model"):
        fabric.backward(layer(torch.ones(4, 8)).mean())
    assert layer.weight.grad is not None


@pytest.mark.parametrize("fused", [None, True])
def test_a_state_made_before_setup_has_the_format_of_the_weights(fused: bool | None) -> None:
    fabric = L.Fabric(accelerator="cpu", devices=1, precision="64-true", fused_optimizer=fused)
    model = nn.Linear(2, 1)
    plain = copy.deepcopy(model).double()
    wrapped, optimizer = fabric.setup(model, torch.optim.Adagrad(model.parameters(), lr=0.1))
    alone = torch.optim.Adagrad(plain.parameters(), lr=0.1, fused=fused)
    for _ in range(3):
        fabric.backward(wrapped(torch.ones(4, 2)).sum())
        plain(torch.ones(4, 2, dtype=torch.float64)).sum().backward()
        optimizer.step()
        alone.step()
    assert torch.equal(wrapped.weight, plain.weight)

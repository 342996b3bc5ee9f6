"""DDP on two processes."""

from __future__ import annotations

import itertools
import os
from typing import Any

import pytest
import torch
from tests.fakes import RowLogger
from tests.models import Classifier, Manual, loader, quiet
from tests.refusals import refused
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import hasten as L
from hasten.resolve import runtime
from hasten.runtime import Runtime
from hasten.strategies import DDPStrategy, ddp


class Model(nn.Module):
    """A model whose training step calls itself, as a LightningModule's does, and has a part it does not use."""

    def __init__(self, unused: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 1)
        self.norm = nn.BatchNorm1d(4)
        if unused:
            self.unused = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.norm(x))

    def training_step(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self(x).pow(2).mean() * scale


def started(strategy: Any = "ddp", precision: Any = None) -> Runtime:
    run = runtime(accelerator="cpu", devices=2, strategy=strategy, precision=precision)
    run.launch(lambda: None)
    return run


def data(rank: int) -> torch.Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(rank))


def gradient_of(model: nn.Module) -> torch.Tensor:
    gradient = model.layer.weight.grad  # type: ignore[union-attr]
    assert isinstance(gradient, torch.Tensor)
    return gradient


@pytest.mark.world_size(2)
def test_a_training_step_averages_gradients_and_the_model_keeps_its_names() -> None:
    for precision in (None, "bf16-mixed", "64-true"):
        averages(started(precision=precision), 1e-2 if precision else 1e-6)


def averages(run: Runtime, tolerance: float) -> None:
    model = Model()
    names = list(model.state_dict())
    run.place(model)
    wrapped = run.wrap(model)
    assert wrapped is not model
    step = run.bind(model.training_step, module=model, wrapped=wrapped, training=True)
    run.engine.backward(step(data(run.global_rank), scale=2.0))
    everywhere = run.all_gather(gradient_of(model))
    assert torch.equal(everywhere[0], everywhere[1])
    assert list(run.strategy.state.state_dict(model)) == names
    assert "forward" not in vars(model)
    alone = []
    for rank in (0, 1):
        twin = Model()
        run.place(twin)
        run.bind(twin.training_step)(data(rank), scale=2.0).backward()
        alone.append(gradient_of(twin))
    assert torch.allclose(gradient_of(model), (alone[0] + alone[1]) / 2, atol=tolerance)


class SecondOrder(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).double()
        self.calls = 0

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layers(x) - 3 * x.sum(1, keepdim=True).sin()).square().mean()

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.loss(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        parameters = self.layers.parameters()
        return torch.optim.LBFGS(parameters, max_iter=6, line_search_fn="strong_wolfe", tolerance_change=1e-3)


@pytest.mark.world_size(2)
def test_lbfgs_decides_by_the_loss_of_all_processes() -> None:
    # Samples of rank 1 have another size: by its own loss it would go another way.
    samples = [data(0).double(), 3 * data(1).double()]
    twin = SecondOrder()
    optimizer: Any = twin.configure_optimizers()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        twin.calls += 1
        loss = sum(map(twin.loss, samples), torch.zeros(())) / 2
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    module, rank = SecondOrder(), int(os.environ["LOCAL_RANK"])
    trainer = quiet(devices=2, strategy="ddp", max_epochs=3, use_distributed_sampler=False)
    trainer.fit(module, [samples[rank]])
    assert module.calls == twin.calls
    for mine, of_twin in zip(module.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, of_twin)


@pytest.mark.world_size(2)
def test_unused_parameters_need_to_be_found() -> None:
    run = started("ddp_find_unused_parameters_true")
    model = Model(unused=True)
    step = run.bind(model.training_step, module=model, wrapped=run.wrap(model), training=True)
    for _ in range(3):
        run.engine.backward(step(data(run.global_rank)))
    first, second = run.all_gather(gradient_of(model))
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        ("ddp", "write strategy='ddp_find_unused_parameters_true'"),
        ("ddp_sharded", "write strategy='ddp_sharded_find_unused_parameters_true'"),
        (DDPStrategy(bucket_cap_mb=1), "write find_unused_parameters=True"),
    ],
)
@pytest.mark.world_size(2)
def test_parameters_without_a_gradient_are_named_with_the_strategy_to_write(strategy: Any, said: str) -> None:
    run = started(strategy)
    model = Model(unused=True)
    model._ddp_params_and_buffers_to_ignore = [] if run.strategy.name == "ddp_sharded" else ["layer.weight"]  # type: ignore[assignment]
    step = run.bind(model.training_step, module=model, wrapped=run.wrap(model), training=True)
    run.engine.backward(step(data(run.global_rank)))
    with refused(RuntimeError, says="unused.weight, unused.bias") as caught:
        step(data(run.global_rank))
    assert said in str(caught.value)


class Branches(Classifier):
    """Leaves out a layer in one batch of some ranks, and logs a value of all processes."""

    def __init__(self, *ranks: int) -> None:
        super().__init__()
        self.other, self.ranks = nn.Linear(1, 1), ranks

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("batch", float(batch_idx), sync_dist=True)
        return loss if self.global_rank in self.ranks and batch_idx == 2 else loss + self.other(torch.ones(1)).sum()


@pytest.mark.world_size(2)
def test_a_layer_that_one_process_leaves_out_is_named_before_another_exchange_meets_its_gradients() -> None:
    ddp._SAME_MOMENT_SECONDS = 0.1
    trainer = quiet(devices=2, strategy="ddp", log_every_n_steps=1, logger=RowLogger())
    if os.environ["LOCAL_RANK"] == "1":
        with refused(RuntimeError, says="in the last step of rank 1, other.weight, other.bias got no gradient"):
            trainer.fit(Branches(1), loader(48))
    else:
        with pytest.raises(RuntimeError):
            trainer.fit(Branches(1), loader(48))


@pytest.mark.world_size(2)
def test_a_layer_that_all_processes_leave_out_is_named_by_the_next_step() -> None:
    rank = os.environ["LOCAL_RANK"]
    with refused(RuntimeError, says=f"in the last step of rank {rank}, other.weight, other.bias got no gradient"):
        quiet(devices=2, strategy="ddp").fit(Branches(0, 1), loader(48))


@pytest.mark.world_size(2)
def test_a_static_graph_trains_as_any_other_also_with_accumulation_and_manual_optimization() -> None:
    for kind, accumulate in ((Classifier, 3), (Manual, 1)):
        weights = []
        for strategy in ("ddp", DDPStrategy(static_graph=True)):
            torch.manual_seed(0)
            model = kind()
            quiet(devices=2, strategy=strategy, accumulate_grad_batches=accumulate, max_epochs=2).fit(model, loader(48))
            weights.append(torch.cat([parameter.flatten() for parameter in model.parameters()]))
        assert torch.allclose(*weights, atol=1e-6)


@pytest.mark.world_size(2)
def test_a_communication_hook_and_parameters_and_buffers_to_ignore() -> None:
    run = started(DDPStrategy(ddp_comm_hook=default_hooks.allreduce_hook))
    model = Model()
    model._ddp_params_and_buffers_to_ignore = ["layer.bias", "own"]  # type: ignore[assignment]
    wrapped = run.wrap(model)
    for name in ("own", "shared"):
        model.register_buffer(name, torch.full((2, 3), float(run.global_rank)).t())
    # As before validation; they are not contiguous in memory.
    run.engine.share_buffers(wrapped)
    assert (model.own == run.global_rank).all()
    assert (model.shared == 0).all()
    step = run.bind(model.training_step, module=model, wrapped=wrapped, training=True)
    run.engine.backward(step(data(run.global_rank)))
    weights, biases = run.all_gather(gradient_of(model)), run.all_gather(model.layer.bias.grad)
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(biases[0], biases[1])


@pytest.mark.world_size(2)
def test_a_run_of_two_is_started_once_and_wraps_what_trains() -> None:
    first, second = started(), started()
    assert first.global_rank == second.global_rank
    assert first.launch(lambda a, b=1: a + b, 2, b=3) == 5
    model = Model().requires_grad_(False)
    assert first.wrap(model) is model
    with refused(RuntimeError, says=("2 processes", "3")):
        runtime(accelerator="cpu", devices=3, strategy="ddp").launch(lambda: None)


def test_one_process_can_be_a_run_of_ddp() -> None:
    run = runtime(accelerator="cpu", devices=1, strategy="ddp")
    model = Model()

    def work() -> bool:
        step = run.bind(model.training_step, module=model, wrapped=run.wrap(model), training=True)
        run.engine.backward(step(data(0)))
        return torch.distributed.get_world_size() == 1

    assert run.launch(work)
    assert not run.engine.exchanges
    assert gradient_of(model).abs().sum() > 0


@pytest.mark.parametrize(
    ("arguments", "kind", "argument"),
    [
        ({"find_unused_parameter": True}, TypeError, "find_unused_parameter"),
        ({"start_method": "pope"}, ValueError, "start_method"),
        ({"timeout": 30}, TypeError, "timeout"),
    ],
)
def test_what_ddp_does_not_take(arguments: dict[str, Any], kind: type[Exception], argument: str) -> None:
    with refused(kind, argument):
        DDPStrategy(**arguments)


# -- what trains changes in the middle of a run


class Grows(L.LightningModule):
    """Trains its head, and by callbacks more than that; each process has data of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 2)
        self.body.requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.body(batch[0]).relu()), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Changes(L.Callback):
    """Unfreezes, freezes or replaces a part, after a batch or where an epoch starts."""

    def __init__(self, what: str, moment: str) -> None:
        self.what, self.moment = what, moment

    def _change(self, model: Grows) -> None:
        if self.what == "replace":
            # All processes go on with that of the first.
            torch.manual_seed(model.global_rank)
            model.head = nn.Linear(8, 2)
            model.trainer.optimizers[0].add_param_group({"params": list(model.head.parameters())})
            return
        model.body.requires_grad_(True)
        model.head.weight.requires_grad = self.what != "freeze"

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 1 and self.moment == "epoch":
            self._change(pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch == 0 and batch_idx == 2 and self.moment == "batch":
            self._change(pl_module)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("what", ["unfreeze", "freeze", "replace"])
def test_parameters_that_come_to_train_in_mid_run_are_exchanged(what: str) -> None:
    batches = list(loader(40))
    # The batches of both processes at once.
    pairs = zip(batches[::2], batches[1::2], strict=True)
    both = [[torch.cat(parts) for parts in zip(*pair, strict=True)] for pair in pairs]
    for moment, accumulate in itertools.product(("batch", "epoch"), (1, 2)):
        expected, model = Grows(), Grows()
        options: dict[str, Any] = {"max_epochs": 2, "accumulate_grad_batches": accumulate}
        quiet(callbacks=Changes(what, moment), **options).fit(expected, both)
        options |= {"devices": 2, "strategy": "ddp", "use_distributed_sampler": False}
        trainer = quiet(callbacks=Changes(what, moment), **options)
        trainer.fit(model, batches[trainer.global_rank :: 2])
        for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.world_size(2)
def test_a_change_on_one_process_alone_is_an_error_that_names_the_ranks() -> None:
    class OnOne(Changes):
        def _change(self, model: Grows) -> None:
            if model.global_rank == 1:
                model.body.weight.requires_grad = True
            else:
                model.body.bias.requires_grad = True

    trainer = quiet(devices=2, strategy="ddp", max_epochs=2, callbacks=[OnOne("unfreeze", "batch")])
    with refused(RuntimeError, says=("Rank 0 and rank 1", "Grows: body.bias")):
        trainer.fit(Grows(), loader(40))


@pytest.mark.world_size(2)
def test_a_validation_uses_the_running_statistics_that_are_saved() -> None:
    class Normed(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.means = Model(), []  # type: ignore[var-annotated]

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return self.model.training_step(batch + self.global_rank)

        def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            self.means.append(self.all_gather(self.model.norm.running_mean))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module = Normed()
    quiet(devices=2, strategy="ddp", max_epochs=1, num_sanity_val_steps=0).fit(module, [data(1), data(2)], [data(3)])
    ((first, second),) = module.means
    assert torch.equal(first, second)
    assert first.abs().sum() > 0

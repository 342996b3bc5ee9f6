"""MeshStrategy: copies, shards and split layers at once, compared with one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.models import loader, quiet
from tests.refusals import refused
from tests.strategies import mixtures
from tests.strategies.test_model_parallel import PLAN, Llama, Net, Recorded, same, tokens, trained, weights
from torch import Tensor
from torch.utils.data import DataLoader

from hasten.resolve import runtime
from hasten.strategies import FSDPStrategy, MeshStrategy, ModelParallelStrategy
from hasten.strategies.mesh.sizes import MeshSizes


def mesh(replicate: Any = 1, shard: Any = "auto", tensor: Any = 1, **options: Any) -> MeshStrategy:
    plan = {"plan": PLAN} if tensor != 1 else {}
    return MeshStrategy(replicate, shard, tensor, **{**plan, **options})


def plainly(module: Recorded) -> Any:
    """Return an optimizer of one operation: torch searches long how each computes with what is divided twice."""
    return torch.optim.SGD(module.parameters(), lr=0.1)


class PlainNet(Net):
    configure_optimizers = plainly


class PlainLlama(Llama):
    configure_optimizers = plainly


@pytest.mark.world_size(4)
def test_every_pair_of_axes_trains_as_one_process(tmp_path: Path) -> None:
    def batches(count: int) -> Any:
        return loader(32, batch_size=8 // count)

    alone = trained(PlainNet(), batches(1), accumulate_grad_batches=2)
    for replicate, shard, tensor in ((2, 2, 1), (2, 1, 2), (1, 2, 2), (4, 1, 1)):
        how = mesh(replicate, shard, tensor)
        many = trained(PlainNet(), batches(replicate * shard), how, 4, accumulate_grad_batches=2)
        same(alone, many)
        assert (how.data_parallel_size, how.tensor_parallel_size) == (replicate * shard, tensor)
        assert how.data_parallel_rank == dist.get_rank() // tensor
        held = sum(value.to_local().numel() for value in many.blocks[0].up.parameters())  # type: ignore[operator, union-attr]
        assert held == 144 // (shard * tensor)
        # 10 samples, which the processes cannot share equally: each counts once.
        other = mesh(replicate, shard, tensor)
        found = quiet(devices=4, strategy=other).validate(many, loader(10), verbose=False)
        expected = quiet().validate(alone, loader(10), verbose=False)
        assert found[0]["val_loss"] == pytest.approx(expected[0]["val_loss"], abs=1e-5)
        # It takes the process groups that there are.
        assert other.device_mesh is how.device_mesh
    language_model = trained(PlainLlama(), tokens(4))
    same(language_model, trained(PlainLlama(), tokens(2), MeshStrategy(1, 2, 2, plan="auto"), 4))
    # Between the stages goes a part of each sequence, and the logits stay split.
    options: Any = {"plan": "auto", "sequence_parallel": True, "loss_parallel": True}
    stages = MeshStrategy(1, 1, 2, pipeline=2, **options)
    many = trained(PlainLlama(), tokens(4), stages, 4)
    for name, value in stages.state.state_dict(many).items():
        torch.testing.assert_close(value, language_model.state_dict()[name], atol=1e-5, rtol=1e-4, msg=name)
    # In this test, because most of the time is the start of four processes.
    mixtures.train_and_resume_as_in_one_process(tmp_path)


@pytest.mark.world_size(4)
def test_ddp_of_four_processes_goes_on_bit_for_bit(tmp_path: Path) -> None:
    # The sum of four gradients depends on their order, which DDP changes after its first step.
    class Steps(Net):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))

        def loss(self, batch: Any) -> Tensor:
            return super().loss((self.layers(batch[0]), batch[1]))

    def fit(epochs: int, **options: Any) -> list[Tensor]:
        torch.manual_seed(5)
        net = Steps()
        trainer = quiet(devices=4, strategy="ddp", max_epochs=epochs)
        trainer.fit(net, loader(32), **options)
        trainer.save_checkpoint(tmp_path / f"{epochs}")
        return [*net.parameters(), *(state["exp_avg"] for state in trainer.optimizers[0].state.values())]

    fit(1)
    for one, other in zip(fit(2), fit(2, ckpt_path=tmp_path / "1"), strict=True):
        assert torch.equal(one, other)


@pytest.mark.world_size(4)
def test_a_checkpoint_of_one_mesh_goes_on_bit_for_bit_and_is_read_on_others(tmp_path: Path) -> None:
    def fit(how: MeshStrategy, epochs: int, **options: Any) -> Net:
        torch.manual_seed(5)
        net = Net()
        trainer = quiet(devices=4, strategy=how, max_epochs=epochs)
        trainer.fit(net, loader(16), **options)
        if not options:
            trainer.save_checkpoint(tmp_path / f"{epochs}")
        return net

    fit(mesh(2, 1, 2, state_dict_type="sharded"), 1)
    uninterrupted = weights(fit(mesh(2, 1, 2, state_dict_type="sharded"), 2))
    resumed = weights(fit(mesh(2, 1, 2), 2, ckpt_path=tmp_path / "1"))
    for key, value in uninterrupted.items():
        assert torch.equal(resumed[key], value), key
    for how, devices in ((mesh(2, 2), 4), (mesh(1, 1, 4), 4), ("fsdp", 4), ("auto", 1)):
        net = Net()
        quiet(devices=devices, strategy=how).validate(net, loader(8), ckpt_path=tmp_path / "2", verbose=False)
        for key, value in weights(net).items():
            assert torch.equal(uninterrupted[key], value), key


def test_sizes_left_open_follow_from_the_others() -> None:
    def sizes(*asked: Any, devices: int = 8, num_nodes: int = 1) -> tuple[int, int, int]:
        how = mesh(*asked)
        runtime(accelerator="cpu", devices=devices, num_nodes=num_nodes, strategy=how)
        assert how.sizes.processes == how.world_size
        return how.sizes.replicate, how.sizes.shard, how.sizes.tensor

    assert sizes() == (1, 8, 1)
    assert sizes(2) == (2, 4, 1)
    assert sizes("auto", 2, 2) == (2, 2, 2)
    assert sizes(2, 2, "auto") == (2, 2, 2)
    assert sizes("auto", "auto", num_nodes=4) == (4, 8, 1)
    assert sizes("auto", "auto", 8, num_nodes=4) == (4, 1, 8)
    for wrong in ((3, "auto"), (2, 2, 4), (16, 1)):
        with refused(ValueError, "replicate", says="which is 8"):
            sizes(*wrong)
    with refused(ValueError, says="at most two", fix="number"):
        mesh("auto", "auto", "auto")


def test_other_spellings_are_meshes() -> None:
    for how, expected in (
        (FSDPStrategy(), MeshSizes(1, 8, 1)),
        (FSDPStrategy(sharding_strategy="HYBRID_SHARD"), MeshSizes(2, 4, 1)),
        (FSDPStrategy(sharding_strategy="HYBRID_SHARD", device_mesh=(4, 2)), MeshSizes(4, 2, 1)),
        (FSDPStrategy(sharding_strategy="NO_SHARD"), MeshSizes(8, 1, 1)),
        (ModelParallelStrategy(), MeshSizes(1, 2, 4)),
        (ModelParallelStrategy(tensor_parallel_size=2), MeshSizes(1, 4, 2)),
    ):
        runtime(accelerator="cpu", devices=4, num_nodes=2, strategy=how)
        assert isinstance(how, MeshStrategy)
        assert how.sizes == expected


def test_arguments_that_mean_nothing_are_refused() -> None:
    for arguments, kind, argument, says in (
        ({"replicate": 0}, ValueError, "replicate", "MeshStrategy(replicate=0)"),
        ({"shard": "all"}, TypeError, "shard", "'all'"),
        ({"plan": "atuo"}, ValueError, "plan", "'atuo'"),
        ({"sequence_parallel": True}, ValueError, "sequence_parallel", "plan"),
        ({"state_dict_type": "local"}, ValueError, "state_dict_type", "'local'"),
        ({"reshard_after_forward": "no"}, TypeError, "reshard_after_forward", "'no'"),
        ({"ignored_modules": [3]}, TypeError, "ignored_modules", "[3]"),
        ({"auto_wrap_policy": {3}}, TypeError, "auto_wrap_policy", "MeshStrategy"),
        ({"cpu_offload": "yes"}, TypeError, "cpu_offload", "'yes'"),
        ({"parallelize_fn": 2}, TypeError, "parallelize_fn", "2"),
        ({"tensro": 2}, TypeError, "tensro", "'tensor'"),
        ({"pipeline": "auto"}, TypeError, "pipeline", "'auto'"),
        ({"schedule": "GPipe"}, ValueError, "schedule", "pipeline"),
        ({"micro_batches": 4}, ValueError, "micro_batches", "pipeline"),
        ({"split": ["layers.1"]}, ValueError, "split", "pipeline"),
        ({"pipeline_stages": 2}, TypeError, "pipeline_stages", "MeshStrategy(pipeline=N)"),
    ):
        with refused((ValueError, TypeError), argument, says=says) as caught:
            MeshStrategy(**arguments)  # type: ignore[arg-type]
        assert isinstance(caught.value, kind), arguments
    with refused(RuntimeError, fix="configure_model()"):
        mesh().device_mesh
    with refused(ValueError, "precision", fix="keep_small_updates=False"):
        quiet(devices=2, strategy=mesh(), precision="bf16-true")


def test_sizes_over_which_experts_cannot_be_divided_are_refused() -> None:
    for arguments, says in (
        ({"expert": 0}, "expert=0"),
        ({"expert": 2, "pipeline": 2}, "pipeline"),
        ({"expert": 2, "tensor": 2, "plan": "auto", "expert_parallel": True}, "expert_parallel"),
    ):
        with refused(ValueError, "expert", says=says):
            MeshStrategy(**arguments)  # type: ignore[arg-type]
    for sizes in ({"shard": 8, "expert": 3}, {"shard": 8, "expert": 16}, {"replicate": 4, "shard": 2, "expert": 6}):
        with refused(ValueError, "expert", says="8"):
            runtime(accelerator="cpu", devices=8, strategy=MeshStrategy(**sizes))  # type: ignore[arg-type]
    with refused(TypeError, "experts", says="MeshStrategy(expert=N)"):
        MeshStrategy(experts=2)


class Question(Llama):
    """The first half of each sequence has no labels, so one process has none."""

    def __init__(self) -> None:
        super().__init__(max_position_embeddings=32)

    def loss(self, batch: Any) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)


def questions(batch_size: int) -> DataLoader[Any]:
    ids = torch.randint(0, 64, (8, 12), generator=torch.Generator().manual_seed(3))
    labels = ids.clone()
    labels[:, :6] = -100
    samples = [{"input_ids": one, "labels": other} for one, other in zip(ids, labels, strict=True)]
    return DataLoader(samples, batch_size)  # type: ignore[arg-type]


@pytest.mark.world_size(4)
def test_divided_sequences_train_as_whole_ones_also_beside_other_axes() -> None:
    alone = trained(Question(), questions(4), accumulate_grad_batches=2)
    for sizes, batch_size in (((1, 1, 1, 4), 4), ((2, 1, 1, 2), 2), ((1, 1, 2, 2), 4), ((1, 1, 1, 2, 2), 4)):
        how = MeshStrategy(*sizes, plan="auto" if sizes[2] > 1 else None)
        many = trained(Question(), questions(batch_size), how, 4, accumulate_grad_batches=2)
        # All in the first process.
        found = how.state.state_dict(many)
        assert bool(found) is (dist.get_rank() == 0)
        for name, value in found.items():
            torch.testing.assert_close(value, alone.state_dict()[name], atol=1e-5, rtol=1e-4, msg=f"{sizes}: {name}")
        torch.testing.assert_close(torch.tensor(many.norms), torch.tensor(alone.norms), atol=1e-5, rtol=1e-4)
        # The mean over all tokens, although one process has none that count.
        for name in ("train_loss_step", "train_loss_epoch"):
            torch.testing.assert_close(many.logged[name], alone.logged[name], atol=1e-5, rtol=1e-4, msg=name)
        assert how.data_parallel_size == sizes[0]
        assert how.data_parallel_rank == dist.get_rank() % (4 // how.sizes.pipeline) // how.sizes.alike
        # Outside of a run the model computes whole sequences.
        assert how.context is None


@pytest.mark.world_size(2)
def test_what_sequences_cannot_be_divided_for_is_refused() -> None:
    class ByItself(Question):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

    for module, data, argument, says in (
        (ByItself(), questions(4), "context", "ByItself"),
        (Net(), loader(), "", "no attention"),
        (Question(), DataLoader(torch.arange(8.0), 4), "batch", "Tensor"),
    ):
        with refused(ValueError, argument, says=says):
            quiet(devices=2, strategy=MeshStrategy(context=2)).fit(module, data)

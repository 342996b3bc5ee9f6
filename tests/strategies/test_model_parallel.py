"""ModelParallelStrategy on two and four processes, compared with one process."""

from __future__ import annotations

import random
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.models import dataset, loader, quiet
from tests.refusals import refused, warned
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import hasten as L
from hasten.resolve import runtime
from hasten.strategies import ModelParallelStrategy

PLAN = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
CLOSE = {"atol": 1e-5, "rtol": 1e-4}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(torch.relu(self.up(self.norm(x)))))


class Recorded(L.LightningModule):
    """Keeps its losses and the norms of its gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []
        self.norms: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, sync_dist=True, on_epoch=True)
        self.losses.append(float(loss.detach()))
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norms.append(float(self.trainer.runtime.engine.clip_norm(self.parameters(), 1e9)))

    def loss(self, batch: Any) -> Tensor:
        raise NotImplementedError

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Net(Recorded):
    """Two blocks, whose norms no plan names."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8, 2)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x), y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Words(Net):
    """A vocabulary in front of the blocks, whose size is odd."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(65, 8), nn.Linear(8, 65)

    def loss(self, batch: Any) -> Tensor:
        (ids,) = batch
        return super().loss((self.words(ids).flatten(0, 1), ids.flatten()))


class Manual(Net):
    """Steps by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.1)
        optimizer.step()
        return loss


class ByHand(Net):
    """Divides itself, as programs for Lightning do."""

    def configure_model(self) -> None:
        assert self.device_mesh is not None
        if hasattr(self.head.weight, "device_mesh"):
            return
        parallelize_module(self, self.device_mesh["tensor_parallel"], PLAN)
        for block in self.blocks:
            fully_shard(block, mesh=self.device_mesh["data_parallel"])
        fully_shard(self.head, mesh=self.device_mesh["data_parallel"])


class Encoder(Recorded):
    """Layers of torch, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def loss(self, batch: Any) -> Tensor:
        x = batch[0].unsqueeze(1).repeat(1, 3, 1)
        return self.encoder(x).pow(3).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        padding = torch.zeros(len(batch[0]), 3, dtype=torch.bool)
        padding[:, 2] = True
        x = batch[0].unsqueeze(1).repeat(1, 3, 1)
        self.log("val_loss", self.encoder(x, src_key_padding_mask=padding)[:, :2].pow(2).mean())


class Llama(Recorded):
    """A small language model of Hugging Face."""

    def __init__(self, **changes: Any) -> None:
        super().__init__()
        transformers = pytest.importorskip("transformers")
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, **changes,
        )  # fmt: skip
        self.model = transformers.LlamaForCausalLM(config).train()

    def loss(self, batch: Any) -> Tensor:
        (tokens,) = batch
        loss: Tensor = self.model(input_ids=tokens, labels=tokens).loss
        return loss


class OfTransformers(Llama):
    """A small model of another family, with dropout."""

    def __init__(self, kind: str) -> None:
        Recorded.__init__(self)
        transformers = pytest.importorskip("transformers")
        torch.manual_seed(0)
        if kind == "gpt2":
            config = transformers.GPT2Config(vocab_size=65, n_embd=32, n_layer=2, n_head=4, n_positions=16)
            self.model = transformers.GPT2LMHeadModel(config).train()
        else:
            how = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False} if kind == "t5 v1.1" else {}
            sizes = {"vocab_size": 65, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
            config = transformers.T5Config(**sizes, **how, decoder_start_token_id=0, pad_token_id=0)
            self.model = transformers.T5ForConditionalGeneration(config).train()


def tokens(batch_size: int) -> DataLoader[Any]:
    ids = torch.randint(0, 64, (8, 7), generator=torch.Generator().manual_seed(3))
    return DataLoader(TensorDataset(ids), batch_size)


def weights(module: nn.Module) -> dict[str, Tensor]:
    """Return whole copies of the parameters."""
    return {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
        for name, value in module.named_parameters()
    }


def trained(module: Recorded, data: Any, strategy: Any = "auto", devices: int = 1, **options: Any) -> Recorded:
    torch.manual_seed(5)
    trainer = quiet(**{"devices": devices, "strategy": strategy, "gradient_clip_val": 0.1, **options})
    trainer.fit(module, data)
    module.logged = dict(trainer.callback_metrics)  # type: ignore[assignment]
    return module


def same(one: Recorded, other: Recorded, **tolerance: float) -> None:
    tolerance = tolerance or CLOSE
    found = weights(other)
    for name, value in weights(one).items():
        torch.testing.assert_close(found[name], value, **tolerance, msg=lambda text, name=name: f"{name}: {text}")
    torch.testing.assert_close(torch.tensor(other.norms), torch.tensor(one.norms), **tolerance)
    torch.testing.assert_close(other.logged["train_loss_epoch"], one.logged["train_loss_epoch"], **tolerance)


def strategy(data: Any = "auto", tensor: Any = "auto", **options: Any) -> ModelParallelStrategy:
    options = {"save_distributed_checkpoint": False, **options}
    return ModelParallelStrategy(data_parallel_size=data, tensor_parallel_size=tensor, **options)


@pytest.mark.world_size(2)
def test_layers_split_over_two_processes_train_as_on_one() -> None:
    two = trained(Net(), loader(), strategy(plan=PLAN), 2, accumulate_grad_batches=2)
    same(trained(Net(), loader(), accumulate_grad_batches=2), two)
    assert tuple(two.blocks[0].up.weight.to_local().shape) == (8, 8)  # type: ignore[union-attr, operator]
    encoders = [trained(Encoder(), loader(), *how) for how in ((), (strategy(plan="auto"), 2))]
    # The same masks, too.
    same(*encoders)
    alone, split = (
        quiet(devices=devices, strategy=how).validate(module, loader(), verbose=False)[0]["val_loss"]
        for module, devices, how in ((encoders[0], 1, "auto"), (encoders[1], 2, strategy(plan="auto")))
    )
    assert split == pytest.approx(alone, abs=1e-5)


@pytest.mark.world_size(2)
def test_a_language_model_with_its_own_plan_trains_as_on_one() -> None:
    alone = trained(Llama(), tokens(4))
    same(alone, trained(Llama(), tokens(4), strategy(plan="auto"), 2))
    split, seen = Llama(), []
    split.model.model.layers[0].self_attn.q_proj.register_forward_pre_hook(
        lambda _, args: seen.extend(args[0].placements)
    )
    same(alone, trained(split, tokens(4), strategy(plan="auto", sequence_parallel=True, loss_parallel=True), 2))
    # A sequence is gathered once for the layers of a block, not by each of them.
    assert set(seen) == {Replicate()}
    rough = {"atol": 2e-2, "rtol": 2e-2}
    same(alone, trained(Llama(), tokens(4), strategy(plan="auto"), 2, precision="bf16-mixed"), **rough)
    tied = trained(Llama(tie_word_embeddings=True), tokens(4), strategy(plan="auto"), 2)
    assert tied.model.lm_head.weight is tied.model.model.embed_tokens.weight  # type: ignore[union-attr]
    same(trained(Llama(tie_word_embeddings=True), tokens(4)), tied)


@pytest.mark.parametrize("kind", ["gpt2", "t5", "t5 v1.1"])
@pytest.mark.world_size(2)
def test_families_without_a_plan_of_their_own_train_as_on_one(kind: str) -> None:
    alone, split = (
        trained(OfTransformers(kind), tokens(4)),
        trained(OfTransformers(kind), tokens(4), strategy(plan="auto"), 2),
    )
    same(alone, split)
    assert split.losses == pytest.approx(alone.losses, abs=1e-5)
    parts = [value for value in split.parameters() if hasattr(value, "to_local")]
    assert sum(each.to_local().numel() for each in parts) < 0.6 * sum(each.numel() for each in parts)
    assert sum(each.numel() for each in parts) > 0.9 * sum(each.numel() for each in split.parameters())


@pytest.mark.world_size(2)
def test_blocks_compile_behind_an_embedding_that_is_split() -> None:
    plan = {**PLAN, "words": "embedding_rowwise", "head": "colwise_gather_output"}
    compiled = {"regional": True, "backend": "aot_eager"}
    two = trained(Words(), tokens(4), strategy(plan=plan), 2, compile=compiled)
    same(trained(Words(), tokens(4)), two)


@pytest.mark.world_size(2)
def test_processes_of_a_group_draw_the_same_numbers() -> None:
    module = Net()
    for block in module.blocks:
        block.dropout.p = 0.3  # type: ignore[union-attr]

    class Disturbs(L.Callback):
        def setup(self, *_: Any) -> None:
            torch.manual_seed(dist.get_rank())
            random.seed(dist.get_rank())

        def on_train_epoch_start(self, *_: Any) -> None:
            torch.rand(1 + dist.get_rank())

    class OwnPart(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(list(dataset())[dist.get_rank() :: 2])

    trained(module, loader(shuffle=True), strategy(plan=PLAN), 2, callbacks=[Disturbs()], max_epochs=2)
    whole = [value for value in module.parameters() if not hasattr(value, "full_tensor")]
    assert len(whole) == 6
    for value in whole:
        everywhere = [torch.empty_like(value) for _ in range(2)]
        dist.all_gather(everywhere, value.detach())
        assert torch.equal(*everywhere)
    for call in ("fit", "validate"):
        with refused(RuntimeError, says="Processes 0 and 1"):
            getattr(quiet(devices=2, strategy=strategy(plan=PLAN)), call)(Net(), DataLoader(OwnPart(), 4))


@pytest.mark.world_size(2)
def test_what_cannot_train_is_refused_before_the_first_batch() -> None:
    class Fused(Net):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), fused=True)

    class Whole(Net):
        def configure_optimizers(self) -> Any:
            return torch.optim.Adafactor(self.parameters())

    class Little(Net):
        tp_plan = {"head": "colwise_gather_output"}  # noqa: RUF012

    with warned(UserWarning, says=("3%", "Little")) if not dist.get_rank() else nullcontext():
        quiet(devices=2, strategy=strategy(plan="auto")).validate(Little(), loader(8), verbose=False)
    divided = trained(Net(), loader(), strategy(plan=PLAN), 2)
    for module, how, options, message in (
        (Net(), strategy(), {}, "nothing divides Net"),
        (Net(), strategy(plan={"blocks.*.upp": "colwise"}), {}, "Did you mean 'blocks.*.up'?"),
        (Fused(), strategy(plan=PLAN), {}, "Pass fused=False"),
        (Net(), strategy(plan=PLAN), {"fused_optimizer": True}, "Leave fused_optimizer out"),
        (Whole(), strategy(plan=PLAN), {}, "Adafactor"),
        (Net(), strategy(plan=PLAN), {"detect_anomaly": True}, "use on_bad_loss='stop'"),
        (divided, strategy(2, 1, plan=PLAN), {}, "with tensor_parallel_size=2"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            quiet(devices=2, strategy=how, **options).fit(module, loader())
        assert module is divided or not module.losses
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        quiet(devices=2, strategy=strategy(plan={"blocks.*.up": "colwise"})).fit(Net(), loader())
    assert "which the next 'rowwise' layer takes" in "".join(caught.value.__notes__)
    fabric = L.Fabric(accelerator="cpu", devices=2, strategy=strategy(plan=PLAN))
    fabric.launch()
    own = fabric.setup_dataloaders(DataLoader(torch.arange(4) + dist.get_rank(), 2))  # type: ignore[arg-type]
    with refused(RuntimeError, says="Processes "):
        next(iter(own))
    elsewhere = L.Fabric(accelerator="cpu", devices=2, strategy=ModelParallelStrategy(lambda model, mesh: nn.ReLU()))
    elsewhere.launch()
    with refused(TypeError, says="ReLU"):
        elsewhere.setup_module(Block())
    nothing = L.Fabric(accelerator="cpu", devices=2, strategy=ModelParallelStrategy(lambda model, mesh: model))
    nothing.launch()
    with warned(UserWarning, says="Block") if not dist.get_rank() else nullcontext():
        nothing.setup_module(Block())


def test_a_pipeline_is_refused_where_another_loop_runs() -> None:
    from torch.distributed.pipelining import Schedule1F1B

    schedule = Schedule1F1B.__new__(Schedule1F1B)
    module = Net()
    module.schedule = schedule
    with refused(ValueError, says=("Schedule1F1B", "examples/pipeline_parallel")):
        quiet().fit(module, loader())
    with refused(TypeError, "model", fix="pipeline_parallel.py"):
        quiet().fit(schedule, loader())  # type: ignore[arg-type]
    with refused(TypeError, says="Schedule1F1B"):
        L.Fabric(accelerator="cpu").setup_module(schedule)  # type: ignore[arg-type]


def test_a_mesh_that_a_strategy_does_not_have_is_named() -> None:
    class Divides(Net):
        def configure_model(self) -> None:
            self.device_mesh["tensor_parallel"]  # type: ignore[index]

    with pytest.raises(TypeError, match="'NoneType' object is not subscriptable") as caught:
        quiet().fit(Divides(), loader())
    assert "self.device_mesh is None under strategy=" in caught.value.__notes__[0]


@pytest.mark.world_size(4)
def test_two_groups_of_two_train_as_one_process() -> None:
    alone = trained(Net(), loader(batch_size=8))
    for module in (Net(), ByHand()):
        how = strategy(2, 2, plan=PLAN if type(module) is Net else None)
        groups = trained(module, loader(), how, 4)
        same(alone, groups)
        assert how.distributed_sampler_kwargs == {"num_replicas": 2, "rank": dist.get_rank() // 2}
        assert how.device_mesh["tensor_parallel"].get_local_rank() == dist.get_rank() % 2
        # Every parameter is sharded over the groups.
        assert all("data_parallel" in value.device_mesh.mesh_dim_names for value in module.parameters())  # type: ignore[attr-defined]
    manual = trained(Manual(), loader(), strategy(2, 2, plan=PLAN), 4, gradient_clip_val=None)
    same(trained(Manual(), loader(batch_size=8), gradient_clip_val=None), manual)
    # 10 samples in batches of 4 on two groups: each counts once.
    found = quiet(devices=4, strategy=strategy(2, 2, plan=PLAN)).validate(groups, loader(10), verbose=False)
    expected = quiet().validate(alone, loader(10), verbose=False)
    assert found[0]["val_loss"] == pytest.approx(expected[0]["val_loss"], abs=1e-5)


@pytest.mark.world_size(4)
def test_a_folder_is_resumed_exactly_and_read_by_other_strategies(tmp_path: Path) -> None:
    path = tmp_path
    run = {"devices": 4, "limit_train_batches": 4}

    def fit(how: Any, epochs: int, **options: Any) -> Net:
        torch.manual_seed(5)
        net = Net()
        trainer = quiet(**{**run, "strategy": how, "max_epochs": epochs})
        trainer.fit(net, loader(), **options)
        if not options:
            trainer.save_checkpoint(path / str(epochs))
        return net

    def folders(data: int, tensor: int) -> ModelParallelStrategy:
        return strategy(data, tensor, plan=PLAN, save_distributed_checkpoint=True)

    fit(folders(2, 2), 1)
    uninterrupted = weights(fit(folders(2, 2), 2))
    assert (path / "2").is_dir()
    resumed = weights(fit(folders(2, 2), 2, ckpt_path=path / "1"))
    for name, value in uninterrupted.items():
        assert torch.equal(resumed[name], value), name
    for how, devices in ((folders(1, 4), 4), (folders(4, 1), 4), ("fsdp", 4), ("ddp", 4), ("auto", 1)):
        net = Net()
        quiet(devices=devices, strategy=how).validate(net, loader(8), ckpt_path=path / "2", verbose=False)
        for name, value in weights(net).items():
            assert torch.equal(uninterrupted[name], value), name


@pytest.mark.world_size(4)
def test_fabric_divides_by_a_function() -> None:
    def parallelize(model: nn.Module, mesh: Any) -> nn.Module:
        parallelize_module(model, mesh["tensor_parallel"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return fully_shard(model, mesh=mesh["data_parallel"])

    def train(fabric: L.Fabric, batch_size: int) -> dict[str, Tensor]:
        fabric.launch()
        torch.manual_seed(0)
        block = Block()
        model = fabric.setup_module(block)
        optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.01))
        for x, _ in fabric.setup_dataloaders(DataLoader(dataset(), batch_size)):
            optimizer.zero_grad()
            fabric.backward(model(x).pow(2).mean())
            fabric.clip_gradients(model, optimizer, max_norm=0.1)
            optimizer.step()
        return weights(block)

    one = train(L.Fabric(accelerator="cpu", devices=1), 8)
    own = ModelParallelStrategy(parallelize, data_parallel_size=2, tensor_parallel_size=2)
    four = train(L.Fabric(accelerator="cpu", devices=4, strategy=own), 4)
    for name, value in one.items():
        torch.testing.assert_close(four[name], value, **CLOSE)


def test_sizes_that_do_not_multiply_to_the_processes_are_refused() -> None:
    def sizes(*given: Any, devices: int = 4, num_nodes: int = 1) -> tuple[int, int]:
        how = strategy(*given, plan=PLAN)
        runtime(accelerator="cpu", devices=devices, num_nodes=num_nodes, strategy=how)
        return how.data_parallel_size, how.tensor_parallel_size

    assert sizes() == (1, 4)
    assert sizes(num_nodes=2) == (2, 4)
    assert sizes("auto", 2) == sizes(2) == sizes(2, 2) == (2, 2)
    for wrong in ((3, 2), (3, "auto"), ("auto", 3), (1, 8), ("auto", 8)):
        message = rf"data_parallel_size={wrong[0]!r}, tensor_parallel_size={wrong[1]!r}\): multiplied, .* which is 4"
        with pytest.raises(ValueError, match=message):
            sizes(*wrong)


def test_arguments_that_mean_nothing_are_refused() -> None:
    for arguments, message in (
        ({"data_parallel_size": 0}, "data_parallel_size=0"),
        ({"tensor_parallel_size": "all"}, "tensor_parallel_size='all'"),
        ({"plan": "atuo"}, "plan='atuo'"),
        ({"plan": {}}, "plan={}"),
        ({"plan": PLAN, "parallelize_fn": print}, "both divide the module"),
        ({"sequence_parallel": True}, "it belongs to a plan"),
        ({"loss_parallel": True}, "it belongs to a plan"),
        ({"parallelize_fn": 2}, "Write data_parallel_size=2"),
        ({"save_distributed_checkpoint": None}, "save_distributed_checkpoint=None"),
        ({"tensor_parallel": 2}, "tensor_parallel=2): unknown argument. Did you mean 'tensor_parallel_size'?"),
        ({"pipeline_parallel_size": 2}, "MeshStrategy(pipeline=N)"),
        ({"context_parallel_size": 2}, "MeshStrategy(context=N)"),
    ):
        with pytest.raises((ValueError, TypeError), match=re.escape(message)):
            ModelParallelStrategy(**arguments)  # type: ignore[arg-type]
    with refused(RuntimeError, fix="configure_model()"):
        strategy(plan=PLAN).device_mesh
    for precision in ("bf16-true", "16-true"):
        with refused(ValueError, "precision", fix="keep_small_updates=False"):
            quiet(devices=2, strategy=strategy(plan=PLAN), precision=precision)

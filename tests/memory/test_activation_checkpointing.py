"""Activation checkpointing: less memory, the same numbers, no trace."""

from __future__ import annotations

import copy
import functools
import random
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

import hasten as L
from hasten._lib import torch_private
from hasten.loops import micro_batches
from hasten.memory import offloaded, recomputed, repeated_blocks
from tests.models import Attempts, Classifier, loader, quiet, same_weights
from tests.refusals import refused, warned


class Block(nn.Module):
    def __init__(self, width: int = 16, dropout: float = 0.2, norm: bool = False) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width) if norm else nn.LayerNorm(width)
        self.layers = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(dropout))
        self.back = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.back(self.layers(self.norm(x)))


class Deep(L.LightningModule):
    def __init__(self, block: Callable[[], nn.Module] = Block, width: int = 16) -> None:
        super().__init__()
        self.first = nn.Linear(8, width)
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.last = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trained(block: Callable[[], nn.Module] = Block, kind: type[Deep] = Deep, **arguments: Any) -> Deep:
    L.seed_everything(0, verbose=False)
    model = kind(block)
    keys, classes = list(model.state_dict()), [type(child) for child in model.modules()]
    quiet(**arguments).fit(model, loader(40, 10))
    assert list(model.state_dict()) == keys
    assert [type(child) for child in model.modules()] == classes
    assert not any("forward" in child.__dict__ for child in model.modules())
    return model


# -- the blocks


def test_blocks_are_found_where_they_are_repeated() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 3)
    assert repeated_blocks(nn.ModuleDict({"body": encoder, "head": nn.Linear(8, 2)})) == list(encoder.layers)
    # Stages of blocks, as in a residual network; a block within a block belongs to it.
    stages = nn.Sequential(nn.Sequential(Block(), Block()), nn.Linear(16, 16), nn.ModuleList([Block(), Block()]))
    assert repeated_blocks(stages) == [*stages[0], *stages[2]]
    assert repeated_blocks(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))) == []
    assert repeated_blocks(nn.ModuleList([Block(), nn.Sequential(nn.Linear(2, 2))])) == []


# -- the numbers


def normed() -> nn.Module:
    return Block(norm=True)


def spectral() -> nn.Module:
    block = Block()
    nn.utils.parametrizations.spectral_norm(block.back)
    return block


class Counts(Block):
    """Writes to its buffers, one of them large."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("table", torch.ones(1 << 19))

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x - self.mean)
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return out * self.table[0]


class Attention(nn.TransformerEncoderLayer):
    """Attention whose dropout draws numbers."""

    def __init__(self) -> None:
        super().__init__(16, 2, 32, dropout=0.3)


class Twice(Deep):
    """Each block is called twice before it is computed again."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in [*self.blocks, *self.blocks]:
            x = block(x)
        return self.last(x)


@pytest.mark.parametrize(
    ("block", "kind", "how"),
    [
        (Block, Deep, "full"),
        *((block, Deep, "selective") for block in (normed, spectral, Counts, Attention)),
        *((block, Twice, "full") for block in (normed, Counts, Attention)),
    ],
)
def test_weights_and_buffers_are_bit_equal_with_dropout_on(
    block: Callable[[], nn.Module], kind: type[Deep], how: str
) -> None:
    assert same_weights(trained(block, kind), trained(block, kind, memory=how))


OF_THE_PROGRAM = random.Random(4)
COUNTED = [0]


def drawn() -> float:
    return OF_THE_PROGRAM.random()


class Draws(Block):
    """Multiplies by a number that each forward draws or counts anew."""

    how: Callable[[Any], Any]

    def __init__(self) -> None:
        super().__init__()
        self.python, self.numpy = random.Random(1), np.random.default_rng(1)
        self.old_numpy = np.random.RandomState(1)
        self.generator = torch.Generator().manual_seed(1)
        self.count, self.seen, self.recent = 0, [1.0], deque([1.0], maxlen=3)
        self.state = SimpleNamespace(inner={"n": 0})
        self.mean: Any = torch.ones(16)
        self.last: Any = torch.zeros(16)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (0.5 + 0.1 * type(self).how(self))

    def counted(self) -> float:
        self.count += 1
        return 0.1 * self.count

    def listed(self) -> float:
        self.seen.append(self.seen[-1] + 0.1)
        return self.seen[-1]

    def queued(self) -> float:
        self.recent.append(self.recent[-1] + 0.1)
        return self.recent[0]

    def nested(self) -> float:
        self.state.inner["n"] += 1
        return 0.1 * self.state.inner["n"]

    def averaged(self) -> Tensor:
        self.mean.mul_(0.9)
        return self.mean

    def replaced(self) -> Tensor:
        self.last = self.last + 0.1
        return self.last

    def appeared(self) -> float:
        self.late = getattr(self, "late", 0) + 1
        return 0.1 * self.late


@pytest.mark.parametrize(
    "how",
    [
        lambda self: random.random(),
        lambda self: float(np.random.rand()),
        lambda self: self.python.random(),
        lambda self: float(self.numpy.random()),
        lambda self: float(self.old_numpy.rand()),
        lambda self: torch.rand(16, generator=self.generator),
        lambda self: OF_THE_PROGRAM.random(),
        lambda self: drawn(),
        Draws.counted,
        Draws.listed,
        Draws.queued,
        Draws.nested,
        Draws.averaged,
        Draws.replaced,
        Draws.appeared,
    ],
)
@pytest.mark.parametrize("kind", [Deep, Twice])
def test_numbers_that_blocks_draw_or_count_are_the_same_again(how: Any, kind: type[Deep]) -> None:
    block = type("OwnDraws", (Draws,), {"how": how})
    models = []
    for memory in ("selective", "full", None):
        OF_THE_PROGRAM.seed(4)
        models.append(trained(block, kind, memory=memory))
        state = models[-1].blocks[0]
        assert state.count == (how is Draws.counted) * 4 * (2 if kind is Twice else 1), "as often as it was called"
    assert same_weights(models[0], models[2])
    assert same_weights(models[1], models[2])


class CountsForAll(Block):
    """Counts where nothing can be restored."""

    def forward(self, x: Tensor) -> Tensor:
        COUNTED[0] += 1
        return super().forward(x) * (1 + 0.1 * COUNTED[0])


class CountsInTheClass(Block):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        type(self).calls += 1
        return super().forward(x) * (1 + 0.1 * self.calls)


class TakesNext(Block):
    def __init__(self) -> None:
        super().__init__()
        self.numbers = iter(range(1000))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + next(self.numbers))


class TogglesAfterForward(Deep):
    """Freezes the weights of the other optimizer between forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        for optimizer in self.optimizers():
            loss = nn.functional.cross_entropy(self(x), y)
            self.toggle_optimizer(optimizer)
            self.manual_backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.blocks, self.last)]


@pytest.mark.parametrize("how", ["selective", "full"])
def test_weights_may_be_frozen_between_forward_and_backward(how: Any) -> None:
    trained = []
    for memory in (None, how):
        L.seed_everything(3, verbose=False)
        model = TogglesAfterForward()
        quiet(max_steps=6, memory=memory).fit(model, loader())
        trained.append(model)
    assert same_weights(*trained)
    assert all(weight.requires_grad for weight in trained[1].parameters())


@pytest.mark.parametrize("how", ["selective", "full"])
@pytest.mark.parametrize("block", [CountsForAll, CountsInTheClass, TakesNext])
def test_what_cannot_be_restored_is_refused_before_the_first_step(block: Any, how: str) -> None:
    model = Deep(block)
    before = copy.deepcopy(model.state_dict())
    with refused(ValueError, "memory", says=(how, f"{block.__name__}.forward")):
        quiet(memory=how).fit(model, loader(40, 10))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_bf16_and_accumulation_and_micro_batches() -> None:
    options: dict[str, Any] = {"precision": "bf16-mixed", "accumulate_grad_batches": 2, "micro_batch": 4}
    assert same_weights(trained(**options), trained(memory="full", **options))


def test_a_decoder_with_a_cache_of_keys_and_values() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    tokens = torch.arange(12).view(2, 6)
    gradients = []
    for how in (None, "selective", "full"):
        L.seed_everything(0, verbose=False)
        model = transformers.LlamaForCausalLM(config).train()
        if how is None:
            model(input_ids=tokens, labels=tokens).loss.backward()
        else:
            with recomputed(model, how):
                model(input_ids=tokens, labels=tokens, use_cache=True).loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    for plain, *others in zip(*gradients, strict=True):
        assert all(torch.equal(plain, other) for other in others)


# -- the cost


def measured(how: str | None) -> tuple[int, int]:
    """Return (peak of the memory of a step in bytes, floating-point operations)."""
    torch.manual_seed(0)
    blocks = nn.Sequential(*(Block(64) for _ in range(6)))
    x = torch.randn(256, 64)

    def step() -> None:
        blocks(x).sum().backward()
        blocks.zero_grad()

    context = recomputed(blocks, how) if how is not None else torch.enable_grad()
    with context:
        step()
        with FlopCounterMode(display=False) as flops:
            step()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            step()
    now = peak = 0
    for event in sorted(profiled.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak, flops.get_total_flops()


def test_less_memory_for_fewer_or_more_operations() -> None:
    plain, selective, full = measured(None), measured("selective"), measured("full")
    assert full[0] < selective[0] < 0.8 * plain[0]
    assert full[0] < 0.4 * plain[0]
    assert plain[1] == selective[1] < full[1]


# -- no trace


def test_a_copy_calls_its_own_blocks_and_a_forward_of_the_user_comes_back() -> None:
    model, calls = Deep(), []

    def own(x: Tensor) -> Tensor:
        calls.append(len(x))
        return x * 2

    model.blocks[1].forward = own
    with recomputed(model, "full"):
        model(torch.ones(2, 8)).sum().backward()
        assert calls
        twin = copy.deepcopy(model)
        assert twin.blocks[0].forward.block is twin.blocks[0]
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.zero_()
        assert twin(torch.ones(2, 8)).abs().sum() == 0
    assert model.blocks[1].forward is own


def test_the_module_is_whole_again_after_an_error() -> None:
    class Fails(Deep):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            assert "forward" in self.blocks[0].__dict__
            raise RuntimeError("mine")

    model = Fails()
    with pytest.raises(RuntimeError, match="mine"):
        quiet(memory="full").fit(model, loader(8, 4))
    assert "forward" not in model.blocks[0].__dict__


def test_nothing_to_recompute_is_refused_before_training() -> None:
    with refused(ValueError, "memory", fix="micro_batch='auto'"):
        quiet(memory="selective").fit(Classifier(), loader(8, 4))


def test_where_nothing_runs_out_nothing_happens() -> None:
    class Watches(Deep):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            assert "forward" not in self.blocks[0].__dict__
            return super().training_step(batch, batch_idx)

    assert same_weights(trained(kind=Watches), trained(kind=Watches, memory="auto"))


# -- once memory runs out


class Limited(Deep):
    """Memory runs out until ``fits(samples, how the blocks are computed)``."""

    fits: Callable[[int, str | None], bool]
    tried = Attempts()

    def forward(self, x: Tensor) -> Tensor:
        patched = self.blocks[0].__dict__.get("forward")
        how = None if patched is None else "selective" if patched.selective else "full"
        if (len(x), how) not in self.tried:
            self.tried.append((len(x), how))
        if not type(self).fits(len(x), how):
            super().forward(x)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return super().forward(x)


def limited(rule: Callable[[int, str | None], bool]) -> type[Limited]:
    return type("Limited", (Limited,), {"fits": staticmethod(rule)})


@pytest.mark.parametrize(
    ("rule", "arguments", "tried"),
    [
        (lambda n, how: how is not None, {"memory": "auto"}, [(10, None), (10, "selective")]),
        (lambda n, how: how == "full", {"memory": "auto"}, [(10, None), (10, "selective"), (10, "full")]),
        (
            lambda n, how: n <= 5 and how is not None,
            {"memory": "auto", "micro_batch": "auto"},
            [(10, None), (10, "selective"), (5, "selective")],
        ),
        (
            lambda n, how: how == "full",
            {"memory": "auto", "micro_batch": "auto"},
            [(10, None), *((n, "selective") for n in (10, 5, 2, 1)), (1, "full")],
        ),
        (lambda n, how: n <= 2, {"memory": "full", "micro_batch": "auto"}, [(10, "full"), (5, "full"), (2, "full")]),
    ],
    ids=["selective", "full", "then-samples", "last-resort", "asked-for"],
)
def test_the_cheapest_way_comes_first(rule: Any, arguments: dict[str, Any], tried: list[Any]) -> None:
    model = trained(kind=limited(rule), **arguments)
    assert model.tried == tried
    if model.tried[-1][0] == 10:
        assert same_weights(model, trained())


def test_one_line_is_logged_and_the_error_names_the_other_lever(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        trained(kind=limited(lambda n, how: how == "selective"), memory="auto")
    (line,) = [record.message for record in caplog.records if "Memory ran out" in record.message]
    assert line.endswith("3 blocks compute again in backward, 'selective' (memory='auto').")
    with pytest.raises(torch.OutOfMemoryError) as caught:
        trained(kind=limited(lambda n, how: False), memory="auto")
    assert "Add micro_batch='auto'" in caught.value.__notes__[-1]


def test_a_resumed_run_recomputes_from_its_first_step(tmp_path: Any) -> None:
    kind = limited(lambda n, how: how == "full")
    L.seed_everything(0, verbose=False)
    trainer = quiet(memory="auto", max_steps=2)
    trainer.fit(kind(), loader(40, 10))
    trainer.save_checkpoint(tmp_path / "mid.ckpt")
    resumed = kind()
    quiet(memory="auto").fit(resumed, loader(40, 10), ckpt_path=tmp_path / "mid.ckpt")
    assert resumed.tried == [(10, "full")]
    assert same_weights(resumed, trained())


class InPlace(Block):
    """Adds to the result of a product in place, which cannot be kept then."""

    def forward(self, x: Tensor) -> Tensor:
        out = self.back(self.layers(self.norm(x)))
        out += x
        return out * out.sigmoid()


class Smooth(Deep):
    """Adds the gradient of its output by its input to the loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0].requires_grad_()
        (slope,) = torch.autograd.grad(self(x).sum(), x, create_graph=True)
        return super().training_step(batch, batch_idx) + slope.square().mean()


def test_gradients_of_gradients_need_all_activations_computed_again() -> None:
    with refused(RuntimeError, says="memory='full'"):
        trained(kind=Smooth, memory="selective")
    kind = type("LimitedSmooth", (limited(lambda n, how: how is not None), Smooth), {})
    auto = trained(kind=kind, memory="auto")
    assert auto.tried == [(10, None), (10, "selective"), (10, "full")]
    assert same_weights(auto, trained(kind=Smooth))
    assert same_weights(trained(kind=Smooth, memory="full"), trained(kind=Smooth))


class MovesFirst(Deep):
    """Computes its loss with the weights after a step of gradient descent (MAML)."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        weights = dict(self.named_parameters())
        loss = super().training_step(batch, batch_idx)
        gradients = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
        moved = {name: w - 0.5 * g for (name, w), g in zip(weights.items(), gradients, strict=True)}
        return nn.functional.cross_entropy(torch.func.functional_call(self, moved, (batch[0],)), batch[1])


def test_blocks_called_with_other_weights_are_computed_again_with_these() -> None:
    assert same_weights(trained(kind=MovesFirst, memory="full"), trained(kind=MovesFirst))


class ByTorchFunc(Deep):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        slope = torch.func.grad(lambda x: self(x).sum())(batch[0])
        return super().training_step(batch, batch_idx) + slope.square().mean()


@pytest.mark.parametrize("memory", ["selective", "full"])
def test_with_torch_func_the_argument_to_leave_out_is_named(memory: str) -> None:
    with refused(RuntimeError, says="memory="):
        trained(kind=ByTorchFunc, memory=memory)
    with refused(RuntimeError, says="torch.autograd.grad") as caught, torch.autograd.graph.save_on_cpu():
        trained(kind=ByTorchFunc)
    assert not any("memory=" in note for note in caught.value.__notes__)


def test_products_changed_in_place_are_computed_again() -> None:
    with pytest.raises(RuntimeError, match="has been mutated") as caught:
        trained(InPlace, memory="selective")
    assert any("memory='full'" in note for note in caught.value.__notes__)
    auto = trained(InPlace, kind=limited(lambda n, how: how is not None), memory="auto")
    assert auto.tried == [(10, None), (10, "selective"), (10, "full")]
    assert same_weights(auto, trained(InPlace))


# -- in host memory


ACTIVATIONS: list[StorageWeakRef] = []


class Kept(Block):
    """Notes its largest activation."""

    def forward(self, x: Tensor) -> Tensor:
        wide = self.layers[1](self.layers[0](self.norm(x)))
        ACTIVATIONS.append(StorageWeakRef(wide.untyped_storage()))
        return x + self.back(wide * 2 * wide)


def test_activations_leave_the_device_and_come_back() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Kept(norm=True), Kept(norm=True))
    again = copy.deepcopy(model)
    x = torch.randn(8, 16)
    model(x).square().sum().backward()
    ACTIVATIONS.clear()
    with offloaded(again, smallest_bytes=0) as blocks:
        loss = again(x).square().sum()
        assert [each.expired() for each in ACTIVATIONS] == [True, True]
        loss.backward()
        copied = copy.deepcopy(again)
        assert copied[0].__dict__["forward"].block is copied[0]
    assert blocks == 2
    assert not any("forward" in block.__dict__ for block in again)
    assert same_weights(model, again)
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    ACTIVATIONS.clear()
    with offloaded(again, smallest_bytes=10**6):
        loss = again(x).square().sum()
        assert [each.expired() for each in ACTIVATIONS] == [False, False]
    ACTIVATIONS.clear()


def test_each_activation_is_copied_once_and_parameters_never(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[torch.Size] = []
    empty_like = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda like, **how: copies.append(like.shape) or empty_like(like, **how))
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2)))
    x = torch.randn(3, 4, requires_grad=True)
    with offloaded(model, smallest_bytes=0):
        loss = model(x).sum()
    assert copies == [x.shape] * 4
    loss.backward()


def test_a_run_with_activations_on_the_host_equals_one_without(monkeypatch: pytest.MonkeyPatch) -> None:
    with warned(UserWarning, says="memory='offload'"):
        plain = trained(memory="offload")
    # As on a GPU.
    monkeypatch.setattr(micro_batches, "is_host", lambda device: False)
    for arguments in ({}, {"micro_batch": 3}, {"precision": "bf16-mixed"}, {"accumulate_grad_batches": 2}):
        monkeypatch.setattr(micro_batches, "offloaded", functools.partial(offloaded, smallest_bytes=0))
        assert same_weights(trained(memory="offload", **arguments), trained(**arguments))
    assert same_weights(plain, trained())
    with refused(ValueError, "memory", fix="Leave memory out.", says="Classifier"):
        quiet(memory="offload").fit(Classifier(), loader(8, 4))
    with refused(ValueError, "memory", fix="selective"):
        quiet(memory="offload", compile=True)


@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
@pytest.mark.world_size(2)
def test_shards_and_offloaded_activations_give_the_same(strategy: str) -> None:
    shards: list[dict[str, Tensor]] = []
    for moves in (False, True):
        L.seed_everything(0, verbose=False)
        model = Deep()
        with offloaded(model, smallest_bytes=0) if moves else torch.enable_grad():
            quiet(devices=2, strategy=strategy).fit(model, loader(40, 10))
        shards.append({name: torch_private.local_part(each.detach()) for name, each in model.named_parameters()})
    for name, one in shards[0].items():
        assert torch.equal(one, shards[1][name]), name


@pytest.mark.gpu
def test_activations_on_the_host_free_memory_of_a_gpu() -> None:
    peaks, gradients = [], []
    for moves in (False, True):
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.1, batch_first=True)
        model = nn.TransformerEncoder(layer, 4).cuda()
        torch.cuda.reset_peak_memory_stats()
        with offloaded(model) if moves else torch.enable_grad():
            model(torch.ones(16, 256, 256, device="cuda")).square().mean().backward()
        peaks.append(torch.cuda.max_memory_allocated())
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert peaks[1] < 0.7 * peaks[0]
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["selective", "full"])
def test_attention_with_dropout_on_a_gpu(how: str) -> None:
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.3, batch_first=True)
    x = torch.randn(4, 128, 64, device="cuda")
    gradients = []
    for recomputes in (False, True):
        torch.manual_seed(0)
        model = nn.TransformerEncoder(layer, 3).cuda()
        context = recomputed(model, how) if recomputes else torch.enable_grad()
        with context, torch.autocast("cuda", torch.bfloat16):
            model(x).square().mean().backward()
        gradients.append([p.grad for p in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)

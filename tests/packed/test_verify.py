"""Models whose blocks mix tokens: packed with the same result, or refused before a weight changes."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.data import DataLoader, TensorDataset

import hasten as L
from hasten._lib.errors import MisconfigurationException
from hasten.callbacks import LambdaCallback
from hasten.packed.blocks import packed_blocks
from tests.models import quiet, same_weights
from tests.packed.test_blocks import KINDS, WIDTH, Reader, batch_of, loader, model_of, trained_both_ways
from tests.refusals import refused


class GatedConv(nn.TransformerEncoderLayer):
    """A convolution over tokens beside the feed-forward layers, which adds nothing before it is trained."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conv = nn.Conv1d(16, 16, 3, padding=1)
        self.gate = nn.Parameter(torch.zeros(()))

    def _ff_block(self, x: Tensor) -> Tensor:
        return super()._ff_block(x) + self.gate * self.conv(x.mT).mT


Layer = nn.TransformerEncoderLayer


def layer_with(name: str, *, forward: Any = None, feed_forward: Any = None) -> type[nn.Module]:
    """A layer with other code around ``forward`` or the feed-forward part: (code of torch, input) -> output."""

    def forward_of(self: Any, src: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return forward(lambda x: Layer.forward(self, x, *args, **kwargs), src)

    def feed_forward_of(self: Any, x: Tensor) -> Tensor:
        return feed_forward(lambda x: Layer._ff_block(self, x), x)

    methods = {"forward": forward_of} if forward else {"_ff_block": feed_forward_of}
    return type(name, (Layer,), methods)


OWN_GENERATOR = torch.Generator()
Mean = layer_with("Mean", forward=lambda forward, x: forward(x) + x.mean(1, keepdim=True))
# Adds where a token is in its sample, which a row does not know.
Places = layer_with("Places", forward=lambda forward, x: forward(x + torch.linspace(0, 1, x.shape[1])[:, None]))
# Other feed-forward code, token by token.
Gated = layer_with("Gated", feed_forward=lambda forward, x: forward(x) * torch.sigmoid(x))
# Stochastic depth, sample by sample.
DROP_PATHS = {
    "torch": lambda x: torch.rand(x.shape[0], 1, 1) > 0.3,
    "torchvision": lambda x: x.new_empty(len(x), 1, 1).bernoulli_(0.7).div_(0.7),
    "python": lambda x: torch.tensor([random.random() > 0.3 for _ in x])[:, None, None],
    "generator": lambda x: torch.rand(len(x), 1, 1, generator=OWN_GENERATOR) > 0.3,
}


def drop_path(kind: str) -> type[nn.Module]:
    return layer_with("DropPath", feed_forward=lambda forward, x: forward(x) * DROP_PATHS[kind](x))


class Statistics(nn.TransformerEncoderLayer):
    """Normalises over the batch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.batch = nn.BatchNorm1d(16)

    def _ff_block(self, x: Tensor) -> Tensor:
        return super()._ff_block(self.batch(x.mT).mT)


class Window(nn.TransformerEncoderLayer):
    """Attends by its own mask."""

    def _sa_block(self, x: Tensor, mask: Any, padding: Any, is_causal: bool = False) -> Tensor:
        far = torch.ones(x.shape[1], x.shape[1]).triu(200).bool()
        return super()._sa_block(x, far, padding)


class OwnAttention(nn.MultiheadAttention):
    def forward(self, query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> Any:
        return super().forward(query * torch.linspace(0.5, 1.5, query.shape[1])[:, None], key, value, **kwargs)


class WithOwnAttention(nn.TransformerEncoderLayer):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.self_attn = OwnAttention(16, 2, batch_first=True)


class WithoutAttention(nn.TransformerEncoderLayer):
    """Mixes tokens by its own products."""

    def _sa_block(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return (x @ x.mT).softmax(-1) @ x


class Patched(nn.TransformerEncoderLayer):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        attend = self.self_attn.forward
        self.self_attn.forward = lambda q, k, v, **kw: attend(q.flip(1), k, v, **kw)  # type: ignore[method-assign]


class Shifted(nn.TransformerEncoderLayer):
    """Queries and keys that are not the values, as DETR has them."""

    def _sa_block(self, x: Tensor, mask: Any, padding: Any, is_causal: bool = False) -> Tensor:
        out, _ = self.self_attn(x.sin(), x.cos(), x, key_padding_mask=padding, need_weights=False)
        return self.dropout1(out)


class LowRank(nn.TransformerEncoderLayer):
    """Weights in two parts, and a layer in the place of ``out_proj`` that torch never calls."""

    class Part(nn.Module):
        def __init__(self, weight: Tensor) -> None:
            super().__init__()
            self.down = nn.Parameter(torch.ones(2, weight.shape[1]) / 9)
            self.up = nn.Parameter(torch.linspace(-1, 1, 2 * weight.shape[0]).view(-1, 2))

        def forward(self, weight: Tensor) -> Tensor:
            return weight + self.up @ self.down

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for module, name in ((self.linear1, "weight"), (self.self_attn, "in_proj_weight")):
            parametrize.register_parametrization(module, name, self.Part(getattr(module, name)))
        plain = self.self_attn.out_proj

        class Doubled(nn.Linear):
            def forward(self, input: Tensor) -> Tensor:
                return 2 * super().forward(input)

        self.self_attn.out_proj = Doubled(16, 16)  # type: ignore[assignment]
        self.self_attn.out_proj.load_state_dict(plain.state_dict())


class Net(Reader):
    """``Reader`` with other layers; ``change`` gets the encoder."""

    def __init__(
        self, layer: Any = nn.TransformerEncoderLayer, change: Callable[[Any], None] | None = None, **options: Any
    ) -> None:
        super().__init__(**options)
        torch.manual_seed(1)
        block = layer(16, 2, 32, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        if change is not None:
            change(self.encoder)


def is_refused(module: Any, said: str, data: Any = None, **arguments: Any) -> None:
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(MisconfigurationException, match=said):
        quiet(max_epochs=1, **{"packed": True, **arguments}).fit(module, data or loader())
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


MIXES = r"Trainer\(packed=True\): TransformerEncoder: block 0 \({}\) mixes tokens of different samples"


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (GatedConv, MIXES.format("GatedConv")),
        (Mean, MIXES.format("Mean")),
        (Statistics, MIXES.format("Statistics")),
        (WithoutAttention, r"block 0 \(WithoutAttention\) has its own attention code"),
        (Places, r"block 0 \(Places\) computes different values for real tokens"),
        (drop_path("python"), "draws from the random generator of Python or NumPy"),
        *(
            (
                drop_path(kind),
                r"random numbers that its blocks draw .* are not a multiple of the \d+ tokens: stochastic depth",
            )
            for kind in ("torch", "torchvision", "generator")
        ),
        (Window, r"Window calls attention with its own mask, of shape \(\d+, \d+\)"),
        (WithOwnAttention, "the forward of its OwnAttention is not torch's"),
        (Patched, "the forward of its MultiheadAttention is not torch's"),
    ],
)
def test_blocks_that_mix_tokens_are_refused_by_name_before_a_weight_changes(layer: Any, said: str) -> None:
    is_refused(Net(layer), said)


@pytest.mark.parametrize(("layer", "whole"), [(Layer, True), (Gated, False), (Shifted, False), (LowRank, False)])
def test_blocks_that_treat_each_token_by_itself_train_as_if_padded(layer: Any, whole: bool) -> None:
    given = loader()
    if whole:
        for sample in given.dataset:
            sample["attention_mask"] = torch.ones_like(sample["attention_mask"])
    trained_both_ways(lambda: Net(layer), given, epochs=2)


def test_a_convolution_is_refused_without_any_padding() -> None:
    whole = [
        {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids[0] % 2}
        for ids in torch.randint(3, 60, (8, WIDTH))
    ]
    is_refused(Net(GatedConv), MIXES.format("GatedConv"), DataLoader(whole, batch_size=1))  # type: ignore[arg-type]


def test_a_layer_used_again_is_computed_each_time_or_refused() -> None:
    def same_twice(encoder: Any) -> None:
        encoder.layers[1] = encoder.layers[0]

    trained_both_ways(lambda: Net(change=same_twice))
    is_refused(
        Net(change=lambda encoder: encoder.layers.append(encoder.layers[0])), "it contains some layers several times"
    )


class Leaves(nn.TransformerEncoder):
    """Uses some of its layers: an early exit, or whole layers dropped."""

    leaves = slice(0, 1)

    def forward(self, src: Tensor, src_key_padding_mask: Any = None, **kwargs: Any) -> Tensor:
        for layer in self.layers[self.leaves]:
            src = layer(src, src_key_padding_mask=src_key_padding_mask)
        return src


class Sides(nn.TransformerEncoder):
    """Returns the first token of each layer as well."""

    def forward(self, src: Tensor, src_key_padding_mask: Any = None, **kwargs: Any) -> Any:
        firsts = []
        for layer in self.layers:
            src = layer(src, src_key_padding_mask=src_key_padding_mask)
            firsts.append(src[:, 0])
        src.firsts = firsts  # type: ignore[attr-defined]
        return src + sum(firsts)[:, None]  # type: ignore[index]


class Between(nn.TransformerEncoder):
    """A convolution between its layers."""

    def forward(self, src: Tensor, src_key_padding_mask: Any = None, **kwargs: Any) -> Any:
        kernel = torch.ones(16, 1, 3) / 3
        for layer in self.layers:
            src = layer(src, src_key_padding_mask=src_key_padding_mask)
            src = nn.functional.conv1d(src.mT, kernel, padding=1, groups=16).mT
        return src


@pytest.mark.parametrize(
    ("kind", "leaves", "said"),
    [
        (Leaves, slice(0, 1), r"Leaves: the last block, block 1 \(TransformerEncoderLayer\), was skipped"),
        (Leaves, slice(1, 2), r"block 1 \(TransformerEncoderLayer\) was called before the first block"),
        (Sides, None, "Sides: its (blocks fail on|output differs)"),
        (Between, None, r"Between: block 1 .* mixes tokens of different samples"),
    ],
)
def test_encoders_with_code_between_their_layers_are_refused(kind: Any, leaves: Any, said: str) -> None:
    def change(encoder: Any) -> None:
        encoder.__class__ = kind
        encoder.leaves = leaves

    is_refused(Net(change=change), said)


def changing(change: Callable[[Any], Any]) -> L.Callback:
    """Change the layers of the encoder after two batches."""
    return LambdaCallback(
        on_train_batch_end=lambda trainer, module, outputs, batch, batch_idx: (
            change(module.encoder.layers) if batch_idx == 1 else None
        )
    )


def keep(*_: Any) -> None:
    raise AssertionError("a refused hook was called")


def test_hooks_inside_blocks_are_refused() -> None:
    hooked = Net(change=lambda encoder: encoder.layers[0].register_forward_hook(keep))
    is_refused(hooked, "the hook keep on TransformerEncoderLayer, inside the blocks")
    hooked = Net(change=lambda encoder: encoder.layers[1].norm2.register_full_backward_hook(keep))
    is_refused(hooked, "the hook keep on LayerNorm, inside the blocks")


class Roll(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.roll(1, 1)


def add_roll(layers: Any) -> None:
    layers[1].linear2 = nn.Sequential(layers[1].linear2, Roll())


def replace_attention(layers: Any) -> None:
    layers[0].self_attn = OwnAttention(16, 2, batch_first=True)


def replace_block(layers: Any) -> None:
    layers[1] = GatedConv(16, 2, 32, batch_first=True)


def replace_forward(layers: Any) -> None:
    forward = layers[1].forward
    layers[1].forward = lambda x, *args, **kwargs: forward(x, *args, **kwargs).flip(1)


def replace_method(layers: Any) -> None:
    feed_forward = layers[1]._ff_block
    layers[1]._ff_block = lambda x: feed_forward(x) + x.mean(1, keepdim=True)


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        (add_roll, "packed"),
        (replace_attention, "packed"),
        (replace_block, "packed"),
        (replace_forward, "packed"),
        (replace_method, "packed"),
        (lambda layers: layers[1].self_attn.register_forward_pre_hook(keep), "packed"),
    ],
)
def test_blocks_that_are_changed_in_a_run_are_verified_again(change: Any, argument: str) -> None:
    with refused(MisconfigurationException, argument):
        quiet(max_epochs=1, packed=True, callbacks=[changing(change)]).fit(Net(), loader())


def test_hooks_on_the_whole_encoder_see_each_call_once_and_padded() -> None:
    padded, packed = Net(), Net()
    counts = []
    for module, lever in ((padded, False), (packed, True)):
        seen: list[torch.Size] = []
        module.encoder.register_forward_hook(lambda *given, seen=seen: seen.append(given[2].shape))
        quiet(max_epochs=1, packed=lever).fit(module, loader())
        counts.append(seen)
    assert counts[0] == counts[1]
    assert counts[0][0] == (3, WIDTH, 16)


class Counting(nn.TransformerEncoderLayer):
    """Counts its calls in a buffer, in an attribute and in a list, and keeps what it saw."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register_buffer("calls", torch.zeros(()))
        self.count, self.widths = 0, []  # type: ignore[var-annotated]
        self.total = torch.zeros(())

    def forward(self, src: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.calls += 1
        self.count += 1
        self.total += src.shape[1]
        self.widths.append(src.shape[1])
        self.last = src.detach()
        return super().forward(src, *args, **kwargs)


def test_the_trial_before_training_leaves_no_trace() -> None:
    module, batch = Net(Counting), batch_of([7, 3, WIDTH, 1])
    real = batch["attention_mask"].bool()
    words = module.words(batch["input_ids"])
    torch.manual_seed(3)
    expected, there = torch.rand(1), random.getstate()
    torch.manual_seed(3)
    with packed_blocks(module):
        module.encoder(words, src_key_padding_mask=~real)
        assert torch.equal(torch.rand(1), expected)
        assert random.getstate() == there
        block: Any = module.encoder.layers[1]
        assert (int(block.calls), block.count, int(block.total), block.widths) == (1, 1, 23, [23])
        assert block.last.shape == (1, 23, 16)
        assert all(one.grad is None for one in module.parameters())


def test_a_draw_that_fails_leaves_the_generator_of_the_user_alone() -> None:
    generator = torch.Generator()
    probabilities = torch.tensor([0.5, 0.5, 2.0])
    fails = layer_with("Fails", feed_forward=lambda _, x: torch.bernoulli(probabilities, generator=generator) + x)
    model, batch = Net(fails), batch_of([7, 3, WIDTH, 1])
    words, before = model.words(batch["input_ids"]), generator.get_state()
    with packed_blocks(model), pytest.raises(RuntimeError, match="p_in"):
        model.encoder(words, src_key_padding_mask=batch["attention_mask"] == 0)
    assert torch.equal(generator.get_state(), before)


# -- models of transformers


class Own(nn.Module):
    """Other attention in the place of BERT's."""

    def __init__(self, of: Any) -> None:
        super().__init__()
        self.query, self.key, self.value = of.query, of.key, of.value

    def forward(self, hidden: Tensor, attention_mask: Any = None, *args: Any, **kwargs: Any) -> Any:
        scores = self.query(hidden) @ self.key(hidden).mT / 4
        if attention_mask is not None:
            scores = scores.masked_fill(attention_mask[:, 0] == 0, -1e9)
        return scores.softmax(-1) @ self.value(hidden), None


class Tuned(L.LightningModule):
    """A model of transformers, trained on its own loss."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.generated: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids, mask, labels = batch
        return self.model(input_ids=ids, attention_mask=mask, labels=labels).loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        found = self.model.generate(batch[0][:, :3], attention_mask=batch[1][:, :3], max_new_tokens=2, do_sample=False)
        self.generated.append(found)
        self.log("seen", found.float().mean())

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(input_ids=batch[0], attention_mask=batch[1], output_hidden_states=True).hidden_states[-1]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def texts(*, left: bool = False, labels: str = "masked") -> DataLoader[Any]:
    batch = batch_of([7, 3, WIDTH, 4, 5, 5, 6, 9], left=left)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    wanted = ids.masked_fill(mask == 0, -100) if labels == "masked" else ids
    if labels == "class":
        wanted = ids[:, 0] % 2
    return DataLoader(TensorDataset(ids, mask, wanted), batch_size=4)


def test_another_self_attention_in_bert_is_refused_by_name() -> None:
    module = Tuned(model_of("bert"))
    for block in module.model.bert.encoder.layer:
        block.attention.self = Own(block.attention.self)
    is_refused(module, r"BertModel: block 0 \(BertLayer\) has its own attention code, Own,", texts(labels="class"))


@pytest.mark.parametrize("labels", ["masked", "all"])
@pytest.mark.parametrize("left", [False, True])
def test_a_loss_that_reads_padding_is_refused_and_others_are_the_same(left: bool, labels: str) -> None:
    # Shifted labels: the first real token is predicted at the last padded place before it.
    data = texts(left=left, labels=labels)
    if left or labels == "all":
        is_refused(Tuned(model_of("gpt2")), "GPT2Model: the loss reads its output at padding", data)
        return
    trained_both_ways(lambda: Tuned(model_of("gpt2")), data)


def test_padding_on_the_left_trains_the_same_where_the_loss_leaves_it_out() -> None:
    data = texts(left=True)
    for sample in zip(*data.dataset.tensors, strict=True):  # type: ignore[attr-defined]
        sample[2][int(sample[1].argmax())] = -100
    trained_both_ways(lambda: Tuned(model_of("llama")), data)


@pytest.mark.parametrize("read", ["mean", "squares"])
def test_a_loss_that_reads_the_padding_of_an_encoder_is_refused(read: str) -> None:
    class Reads(Reader):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            padding = batch["attention_mask"] == 0
            hidden = self.encoder(self.words(batch["input_ids"]), src_key_padding_mask=padding)
            pooled = hidden.mean(1) if read == "mean" else hidden[:, 0]
            loss = nn.functional.cross_entropy(self.head(pooled), batch["labels"])
            return loss + hidden.square().mean() if read == "squares" else loss

    is_refused(Reads(), "TransformerEncoder: the loss reads its output at padding")


@pytest.mark.parametrize("reads", [True, False])
def test_a_head_on_a_frozen_encoder_trains_the_same_or_is_refused(reads: bool) -> None:
    class Probe(Reader):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            padding = batch["attention_mask"] == 0
            hidden = self.encoder(self.words(batch["input_ids"]), src_key_padding_mask=padding)
            if not reads:
                hidden = hidden.masked_fill(padding[..., None], 0.0)
            return nn.functional.cross_entropy(self.head(hidden.mean(1)), batch["labels"])

    def frozen() -> Probe:
        module = Probe()
        module.encoder.requires_grad_(False)
        module.words.requires_grad_(False)
        return module

    if reads:
        refused(frozen(), "TransformerEncoder: the loss reads its output at padding")
    else:
        trained_both_ways(frozen, epochs=2)


def test_generation_and_prediction_of_a_packed_run_are_those_of_a_padded_one() -> None:
    padded, packed = (Tuned(model_of("gpt2")) for _ in range(2))
    data = texts()
    predictions = []
    for module, lever in ((padded, False), (packed, True)):
        trainer = quiet(max_epochs=2, packed=lever)
        trainer.fit(module, data, data)
        predictions.append(trainer.predict(module, texts(left=True)))
    assert len(packed.generated) == len(padded.generated) > 0
    for one, other in zip(packed.generated, padded.generated, strict=True):
        assert torch.equal(one, other)
    for one, other in zip(*predictions, strict=True):
        # At padded places as well.
        torch.testing.assert_close(one, other)


def test_a_model_that_is_only_called_without_gradients_is_told_that_packing_does_nothing() -> None:
    model = model_of("bert")
    with (
        torch.no_grad(),
        pytest.warns(UserWarning, match="called without gradients only.*Leave it out"),
        packed_blocks(model),
    ):
        model(**batch_of([7, 3]))


def test_a_model_in_eval_mode_is_packed_where_it_is_trained() -> None:
    # As from_pretrained gives it.
    _, packed = trained_both_ways(lambda: Tuned(model_of("bert").eval()), texts(labels="class"))
    assert not same_weights(packed, Tuned(model_of("bert")))


@pytest.mark.parametrize("name", KINDS)
def test_dropout_of_single_elements_is_not_mistaken_for_one_of_samples(name: str) -> None:
    model, batch = model_of(name, dropout=0.3), batch_of([7, 3, WIDTH, 1])
    with packed_blocks(model):
        assert model(**batch).logits.isfinite().all()

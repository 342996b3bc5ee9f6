"""Trainer(packed=True): the same losses from real tokens alone, for models of several makes."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import hasten as L
from hasten._lib.errors import MisconfigurationException
from hasten.packed.blocks import packed_blocks
from tests.models import quiet, same_weights
from tests.refusals import refused

WORDS, WIDTH = 60, 12


SMALL: dict[str, Any] = {"vocab_size": WORDS, "initializer_range": 0.5}
BERT = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
DROPOUTS = ["hidden_dropout_prob", "attention_probs_dropout_prob"]
# Of each model: the prefix of its configuration, what follows it in the name of its class, its size, its dropouts.
KINDS: dict[str, tuple[str, str, dict[str, Any], list[str]]] = {
    "bert": ("Bert", "ForSequenceClassification", BERT, DROPOUTS),
    "roberta": ("Roberta", "ForMaskedLM", BERT, DROPOUTS),
    "electra": ("Electra", "ForSequenceClassification", {**BERT, "embedding_size": 16}, DROPOUTS),
    "distilbert": (
        "DistilBert",
        "ForSequenceClassification",
        {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32},
        ["dropout", "attention_dropout", "seq_classif_dropout"],
    ),
    "gpt2": (
        "GPT2",
        "LMHeadModel",
        {"n_embd": 16, "n_layer": 2, "n_head": 2, "use_cache": False, "bos_token_id": 1, "eos_token_id": 2},
        ["resid_pdrop", "embd_pdrop", "attn_pdrop"],
    ),
    "llama": ("Llama", "ForCausalLM", {**BERT, "num_key_value_heads": 1, "use_cache": False}, []),
}


def model_of(name: str, *, dropout: float = 0.0) -> Any:
    """A small model of transformers, in float64; its weights are large, so that each token counts."""
    transformers = pytest.importorskip("transformers")
    prefix, suffix, size, dropouts = KINDS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{prefix}Config")(**SMALL, **size, **dict.fromkeys(dropouts, dropout))
    return getattr(transformers, prefix + suffix)(config).double().train()


def batch_of(lengths: list[int], *, left: bool = False) -> dict[str, Tensor]:
    columns = torch.arange(WIDTH)
    lengths_column = torch.tensor(lengths)[:, None]
    mask = (columns >= WIDTH - lengths_column) if left else (columns < lengths_column)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, WORDS, (len(lengths), WIDTH), generator=generator)
    return {"input_ids": ids * mask, "attention_mask": mask.long()}


def logits_and_gradients(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
    model.zero_grad()
    logits = model(**batch).logits
    if logits.dim() == 3:
        logits = logits * batch["attention_mask"][..., None]
    # Of each sample another weight, so that no two could be exchanged.
    weights = torch.linspace(1, 2, logits.shape[0], dtype=logits.dtype)
    (logits.flatten(1).square().sum(1) * weights).sum().backward()
    return logits.detach(), [one.grad.clone() for one in model.parameters() if one.grad is not None]


def widths_of(block: nn.Module) -> list[int]:
    """Return a list that gets the tokens in a row of each call of a block from now on."""
    widths: list[int] = []
    forward = block.forward

    def recorded(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        widths.append(hidden.shape[1])
        return forward(hidden, *args, **kwargs)

    block.forward = recorded  # type: ignore[method-assign]
    return widths


@pytest.mark.parametrize("name", KINDS)
def test_losses_and_gradients_are_those_of_the_padded_batch(name: str) -> None:
    model = model_of(name)
    batch = batch_of([7, 3, WIDTH, 1, 3])
    logits, gradients = logits_and_gradients(model, batch)
    widths = widths_of(next(one for one in model.modules() if isinstance(one, nn.ModuleList))[0])
    with packed_blocks(model) as count:
        packed_logits, packed_gradients = logits_and_gradients(model, batch)
    assert count == 2
    # The block saw the 26 real tokens in one row, not 5 rows of 12; before that a few samples were tried.
    assert widths[-1] == 26
    torch.testing.assert_close(packed_logits, logits, rtol=1e-9, atol=1e-9)
    for one, other in zip(packed_gradients, gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-8)


def test_a_batch_without_a_mask_is_whole() -> None:
    model, batch = model_of("bert"), batch_of([WIDTH, WIDTH])
    ids = {"input_ids": batch["input_ids"]}
    with packed_blocks(model):
        packed = model(**ids).logits
    torch.testing.assert_close(packed, model(**ids).logits)


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_without_gradients_a_model_computes_as_if_it_were_not_packed(name: str) -> None:
    model, batch = model_of(name, dropout=0.5).eval(), batch_of([7, 3, WIDTH, 1], left=True)
    logits_and_gradients(model, batch_of([WIDTH, 2]))
    for without in (torch.no_grad(), torch.inference_mode()):
        with without:
            exact = model(**batch, output_hidden_states=True)
            with packed_blocks(model):
                found = model(**batch, output_hidden_states=True)
            # At padded places as well.
            assert torch.equal(found.logits, exact.logits)
            assert all(torch.equal(*pair) for pair in zip(found.hidden_states, exact.hidden_states, strict=True))


def test_afterwards_the_model_is_as_before() -> None:
    model = model_of("bert")
    before, keys = dict(vars(model)), list(model.state_dict())

    def fail() -> None:
        assert list(model.state_dict()) == keys
        raise KeyError("stop")

    with pytest.raises(KeyError, match="stop"), packed_blocks(model):
        fail()
    assert vars(model).keys() == before.keys()
    assert not any(one._forward_pre_hooks or one._forward_hooks for one in model.modules())
    assert not any("forward" in vars(one) for one in model.modules())
    copy.deepcopy(model)


@pytest.mark.parametrize(
    ("name", "left_out"), [("bert", "some"), ("bert", "none"), ("distilbert", "some"), ("electra", "some")]
)
def test_the_last_block_for_first_tokens_gives_the_same_gradients(name: str, left_out: str) -> None:
    model = model_of(name)
    batch = batch_of([7, 3, WIDTH, 1, 3] if left_out == "some" else [WIDTH] * 3)
    if left_out == "none":
        del batch["attention_mask"]
    logits, gradients = logits_and_gradients(model, batch)
    blocks = next(one for one in model.modules() if isinstance(one, nn.ModuleList))
    widths = [widths_of(blocks[i]) for i in (0, 1)]
    with packed_blocks(model, first_token=True):
        for _ in range(2):
            packed_logits, packed_gradients = logits_and_gradients(model, batch)
            torch.testing.assert_close(packed_logits, logits, rtol=1e-9, atol=1e-9)
            for one, other in zip(packed_gradients, gradients, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-8)
        # Where no gradients are computed all tokens are there, for whatever is measured of them.
        with torch.no_grad():
            assert model(**batch).logits.isfinite().all()
    tokens = 26 if left_out == "some" else 3 * WIDTH
    samples = 5 if left_out == "some" else 3
    assert [each[-3:] for each in widths] == [[tokens, tokens, WIDTH], [samples, samples, WIDTH]]
    torch.testing.assert_close(model(**batch).logits.detach(), logits)


@pytest.mark.parametrize("first_token", [False, True])
def test_a_sample_without_tokens_harms_no_other(first_token: bool) -> None:
    model, batch = model_of("bert"), batch_of([7, 0, 3, 0])

    def gradients(given: dict[str, Tensor], there: list[int]) -> list[Tensor]:
        model.zero_grad()
        model(**given).logits[there].sin().sum().backward()
        return [one.grad.clone() for one in model.parameters() if one.grad is not None]

    exact = gradients({name: each[[0, 2]] for name, each in batch.items()}, [0, 1])
    with packed_blocks(model, first_token=first_token):
        for _ in range(2):
            for one, other in zip(gradients(batch, [0, 2]), exact, strict=True):
                torch.testing.assert_close(one, other)
        # Of nothing there is nothing to read.
        with refused(MisconfigurationException, "packed"):
            gradients(batch, [1])


def test_first_tokens_with_recomputed_activations() -> None:
    model, batch = model_of("bert").train(), batch_of([7, 3, WIDTH, 1])
    logits, gradients = logits_and_gradients(model, batch)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with packed_blocks(model, first_token=True):
        packed_logits, packed_gradients = logits_and_gradients(model, batch)
    torch.testing.assert_close(packed_logits, logits)
    for one, other in zip(packed_gradients, gradients, strict=True):
        torch.testing.assert_close(one, other)
    model.gradient_checkpointing_enable({"use_reentrant": True})
    with (
        packed_blocks(model, first_token=True),
        refused(MisconfigurationException, "packed", fix="use_reentrant=False"),
    ):
        model(**batch)


@pytest.mark.parametrize("read", ["mean", "last"])
def test_a_loss_of_other_tokens_is_refused_before_a_step(read: str) -> None:
    model, batch = model_of("bert").bert, batch_of([7, 3, WIDTH, 1])
    with packed_blocks(model, first_token=True):
        hidden = model(**batch).last_hidden_state
        assert hidden[:, 0].isfinite().all()
        assert hidden[:, 1:].isnan().all()
        loss = hidden.mean() if read == "mean" else hidden[0, 6].sum()
        with refused(MisconfigurationException, "packed", fix="packed=True"):
            loss.backward()


def test_padding_on_the_left_leaves_no_first_token_to_read() -> None:
    model, batch = model_of("bert"), batch_of([7, 3], left=True)
    with (
        packed_blocks(model, first_token=True),
        refused(MisconfigurationException, "packed", says=["BertModel", "pad them on the right"]),
    ):
        model(**batch).logits.sum().backward()


class FirstReader(L.LightningModule):
    """A classifier of ``nn.TransformerEncoder`` that reads the first token."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.reader = Reader(**options)
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        real = batch["attention_mask"].bool()
        words = self.reader.words(batch["input_ids"])
        hidden = self.reader.encoder(words, src_key_padding_mask=~real)
        loss = nn.functional.cross_entropy(self.reader.head(hidden[:, 0]), batch["labels"])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize(("norm_first", "bias"), [(False, True), (True, False)])
def test_a_training_on_first_tokens_gives_the_same_weights(norm_first: bool, bias: bool) -> None:
    trained_both_ways(lambda: FirstReader(norm_first=norm_first, bias=bias), epochs=2, packed="first_token")


def test_a_training_on_all_tokens_refuses_to_leave_them_out() -> None:
    module = Reader()
    before = copy.deepcopy(module)
    with refused(MisconfigurationException, "packed", says="TransformerEncoder"):
        quiet(max_epochs=1, packed="first_token").fit(module, loader())
    assert same_weights(module, before)


@pytest.mark.parametrize(
    ("arguments", "error", "argument"),
    [
        ({"packed": "first_tokens"}, ValueError, "packed"),
        ({"packed": 1}, TypeError, "packed"),
    ],
)
def test_first_token_arguments(arguments: dict[str, Any], error: type[Exception], argument: str) -> None:
    with refused(error, argument):
        L.Trainer(**arguments)


@pytest.mark.parametrize("first_token", [False, True])
def test_nothing_holds_the_blocks_afterwards(first_token: bool) -> None:
    model = model_of("bert")
    with packed_blocks(model, first_token=first_token):
        logits_and_gradients(model, batch_of([7, 3]))
    seen = weakref.ref(model.bert.encoder.layer[0])
    del model
    gc.collect()
    assert seen() is None


class Reader(L.LightningModule):
    """Two blocks of ``nn.TransformerEncoder`` on padded sequences, and their mean classified."""

    def __init__(self, dropout: float = 0.0, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout, **{"batch_first": True, **options})
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 2)
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        real = batch["attention_mask"].bool()
        hidden = self.encoder(self.words(batch["input_ids"]), src_key_padding_mask=~real)
        mean = (hidden * real[..., None]).sum(1) / real.sum(1, keepdim=True)
        losses = nn.functional.cross_entropy(self.head(mean), batch["labels"], reduction="none")
        self.losses += losses.tolist()
        return losses.mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader() -> DataLoader[Any]:
    batch = batch_of([7, 3, WIDTH, 1, 5, 5, 2, 9])
    labels = torch.tensor([0, 1, 1, 0, 0, 1, 0, 1])
    samples = [{"labels": labels[i], **{name: each[i] for name, each in batch.items()}} for i in range(8)]
    return DataLoader(samples, batch_size=3)


def assert_same_weights(one: nn.Module, other: nn.Module, **tolerance: float) -> None:
    """Compare the weights of two modules; by default as trained in float32, in another order of sums."""
    for mine, its in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, its, **(tolerance or {"rtol": 1e-4, "atol": 1e-5}))


def trained_both_ways(
    make: Callable[[], Any], data: Any = None, *, epochs: int = 1, **arguments: Any
) -> tuple[Any, Any]:
    """Train a module padded and another packed, compare their weights, and return both."""
    padded, packed = make(), make()
    quiet(max_epochs=epochs).fit(padded, data or loader())
    quiet(max_epochs=epochs, **{"packed": True, **arguments}).fit(packed, data or loader())
    if hasattr(padded, "losses"):
        assert packed.losses == pytest.approx(padded.losses, abs=1e-5)
    assert_same_weights(packed, padded)
    return padded, packed


@pytest.mark.parametrize("norm_first", [False, True])
def test_a_training_gives_the_same_losses_and_weights(norm_first: bool) -> None:
    padded, _ = trained_both_ways(lambda: Reader(norm_first=norm_first), epochs=2)
    assert len(padded.losses) == 16


@pytest.mark.parametrize("given", ["hint", "mask alone", "numbers"])
def test_an_encoder_that_looks_back_only_does_so_packed(given: str) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    real = batch_of([7, 3, WIDTH, 1])["attention_mask"].bool()
    mask: Tensor = nn.Transformer.generate_square_subsequent_mask(WIDTH)
    padding: Tensor = ~real
    if given == "numbers":
        padding = torch.zeros(padding.shape).masked_fill(padding, -torch.inf)
    elif given == "mask alone":
        mask = mask == -torch.inf
    options: dict[str, Any] = {"mask": mask, "src_key_padding_mask": padding}
    if given == "hint":
        options["is_causal"] = True
    x = torch.randn(4, WIDTH, 16)
    exact = encoder(x, **options)
    rows = widths_of(encoder.layers[1])
    with packed_blocks(encoder):
        packed = encoder(x, **options)
    assert rows[-1] == 23
    torch.testing.assert_close(packed[real], exact[real], rtol=1e-4, atol=1e-5)


def test_a_mask_that_cannot_be_packed_is_refused_not_ignored() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    x, window = torch.randn(2, WIDTH, 16), torch.zeros(WIDTH, WIDTH, dtype=torch.bool)
    window[0, 5] = True
    with packed_blocks(encoder), refused(ValueError, "packed", says="(12, 12)"):
        encoder(x, mask=window)
    with packed_blocks(encoder), refused(ValueError, "packed", says="0 and"):
        encoder(x, src_key_padding_mask=torch.full((2, WIDTH), 0.5))


def test_the_dropout_of_a_packed_run_repeats_with_the_seed() -> None:
    def trained(packed: bool) -> Reader:
        module = Reader(dropout=0.2)
        L.seed_everything(5)
        quiet(packed=packed).fit(module, loader())
        return module

    assert same_weights(trained(True), trained(True))
    assert not same_weights(trained(True), trained(False))


def test_a_padded_checkpoint_goes_on_packed(tmp_path: Any) -> None:
    padded = quiet(max_epochs=1)
    padded.fit(Reader(), loader())
    padded.save_checkpoint(tmp_path / "half.ckpt")
    whole, rest = Reader(), Reader()
    quiet(max_epochs=2).fit(whole, loader())
    quiet(max_epochs=2, packed=True).fit(rest, loader(), ckpt_path=tmp_path / "half.ckpt")
    assert_same_weights(rest, whole)


class Images(Reader):
    """No transformer at all."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(16, 16)


@pytest.mark.parametrize(
    ("module", "said"),
    [(Images, "Images has no transformer"), (lambda: Reader(batch_first=False), "batch_first=False")],
)
def test_a_module_that_cannot_be_packed_is_told_before_training(module: Any, said: str) -> None:
    with refused(ValueError, "packed", fix="batching='length'"):
        quiet(packed=True).fit(module(), loader())


def test_what_needs_padded_blocks_is_refused_in_the_first_step() -> None:
    model, batch = model_of("bert"), batch_of([7, 3])
    with (
        packed_blocks(model, asked="Trainer(packed=True)"),
        refused(ValueError, "packed", says="BertModel"),
    ):
        model(**batch, output_hidden_states=True)
    every_pair = batch["attention_mask"][:, None, None].expand(-1, 1, WIDTH, WIDTH)
    with packed_blocks(model), refused(ValueError, "packed", fix="attention_mask"):
        model(input_ids=batch["input_ids"], attention_mask=every_pair)

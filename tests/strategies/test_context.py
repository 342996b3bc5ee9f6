"""Context parallel on two and four processes, compared with one process."""

from __future__ import annotations

import copy
from collections import UserDict, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.refusals import refused
from torch import Tensor, nn

from hasten.strategies import context
from hasten.strategies.context import ContextSplit, attention, find_documents, first_position, split_batch

WORDS, WIDTH, HEADS = 32, 16, 4
CLOSE = {"atol": 1e-6, "rtol": 1e-5}


class Decoder(nn.Module):
    """A layer of attention with positions of its own, and one that is given them with the batch."""

    def __init__(self, key_heads: int = HEADS) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(64, WIDTH)
        self.q, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS)
        self.kv = nn.Linear(WIDTH, 2 * key_heads * WIDTH // HEADS)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        documents = None if positions is None else find_documents(positions)
        if positions is None:
            positions = first_position(tokens.size(1)) + torch.arange(tokens.size(1))
        x = self.words(tokens) + self.places(positions)
        q = self.q(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (2, -1, WIDTH // HEADS)).permute(2, 0, 3, 1, 4)
        attended = attention(q, k, v, is_causal=True, enable_gqa=True, documents=documents)
        logits: Tensor = self.out(x + attended.transpose(1, 2).flatten(2))
        return logits


def own(**options: Any) -> nn.Module:
    return Decoder(**options).double()


def loss_of_decoder(module: nn.Module, batch: Any) -> Tensor:
    if isinstance(batch, dict):
        return F.cross_entropy(
            module(batch["input_ids"], batch["position_ids"]).flatten(0, 1), batch["labels"].flatten()
        )
    tokens, targets = batch
    return F.cross_entropy(module(tokens).flatten(0, 1), targets.flatten())


def loss_of_transformer(module: nn.Module, batch: Any) -> Tensor:
    loss: Tensor = module(**batch).loss
    return loss


SMALL: dict[str, Any] = {"vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": HEADS, "max_position_embeddings": 64, "use_cache": False, "pad_token_id": 0}


def of_transformers(family: str, head: str = "ForCausalLM", **options: Any) -> nn.Module:
    """Return a small model with random weights in 64 bits; transformers is imported by the tests that need it."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SMALL | options)
    model: nn.Module = getattr(transformers, family + head)(config).double()
    return model


def llama() -> nn.Module:
    return of_transformers("Llama", num_key_value_heads=2)


def odd_heads() -> nn.Module:
    """Return a model whose heads do not divide over two or four processes; three have the same key."""
    return of_transformers("Llama", hidden_size=36, num_attention_heads=9, num_key_value_heads=3)


def mistral() -> nn.Module:
    return of_transformers("Mistral", num_key_value_heads=2, sliding_window=5)


def gpt2() -> nn.Module:
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return of_transformers("GPT2", "LMHeadModel", bos_token_id=1, eos_token_id=1, **off)


def bert() -> nn.Module:
    return of_transformers("Bert", "ForMaskedLM", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)


def trained(
    make: Callable[[], nn.Module],
    batches: list[Any],
    loss_of: Callable[[nn.Module, Any], Tensor],
    split: ContextSplit | None = None,
    *,
    adam: bool = False,
) -> tuple[nn.Module, list[float]]:
    """Train with each batch once, on one process or on those of ``split``; return the module and its losses."""
    torch.manual_seed(0)
    module = make()
    options = {"lr": 0.01, "eps": 1e-4} if adam else {"lr": 0.1}
    optimizer = (torch.optim.AdamW if adam else torch.optim.SGD)(module.parameters(), **options)
    losses = []
    if split is not None:
        split.prepare(module)
    for batch in batches:
        optimizer.zero_grad()
        if split is None:
            loss = loss_of(module, batch)
            loss.backward()
        else:
            with split.active():
                part = split.split(batch)
                loss = split.weighed(loss_of(module, part), part)
                loss.backward()
            loss = loss.detach()
            for each in [loss, *(parameter.grad for parameter in module.parameters() if parameter.grad is not None)]:
                dist.all_reduce(each)
                each /= split.size
        optimizer.step()
        losses.append(float(loss.detach()))
    if split is not None:
        split.release()
    return module, losses


def same(one: tuple[nn.Module, list[float]], more: tuple[nn.Module, list[float]]) -> None:
    assert more[1] == pytest.approx(one[1], rel=1e-6)
    expected = one[0].state_dict()
    for name, value in more[0].state_dict().items():
        torch.testing.assert_close(value, expected[name], **CLOSE, msg=lambda text, name=name: f"{name}: {text}")


def split_of_all() -> ContextSplit:
    return ContextSplit(dist.new_group(list(range(dist.get_world_size()))))


def tokens(length: int = 16, rows: int = 2, steps: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, WORDS, (rows, length), generator=generator) for _ in range(steps)]


def pairs(**options: Any) -> list[Any]:
    return [(each, each.flip(0)) for each in tokens(**options)]


def causal(ids: Tensor, **others: Any) -> dict[str, Any]:
    return {"input_ids": ids, "labels": ids.clone(), **others}


def padded(side: str) -> list[Any]:
    found = []
    for ids in tokens():
        mask = torch.ones_like(ids)
        places = {"right": slice(11, 16), "left": slice(0, 5), "within": slice(4, 7)}[side]
        mask[0, places] = 0
        found.append(causal(ids, attention_mask=mask) | {"labels": ids.masked_fill(mask == 0, -100)})
    return found


def packed(**options: Any) -> list[Any]:
    found = []
    for ids in tokens(**options):
        length = ids.size(1)
        positions = torch.stack([torch.cat([torch.arange(cut), torch.arange(length - cut)]) for cut in (3, length - 5)])
        found.append(causal(ids, position_ids=positions))
    return found


def answers_only() -> list[Any]:
    """Return batches whose first half has no labels, as when a long question stands before a short answer."""
    return [causal(ids) | {"labels": torch.cat([ids.new_full((2, 11), -100), ids[:, 11:]], 1)} for ids in tokens()]


# -- whole trainings


@pytest.mark.world_size(2)
def test_an_own_decoder_trains_as_on_one() -> None:
    split = split_of_all()
    aligned = [batch | {"labels": batch["labels"].roll(-1, 1)} for batch in packed()]
    for adam in (False, True):
        for batches in (pairs(), aligned):
            same(*(trained(own, batches, loss_of_decoder, how, adam=adam) for how in (None, split)))
    # One head of keys for two processes.
    few = lambda: own(key_heads=1)  # noqa: E731
    same(*(trained(few, pairs(), loss_of_decoder, how) for how in (None, split)))


@pytest.mark.world_size(4)
def test_four_processes_train_as_one() -> None:
    split = split_of_all()
    few = lambda: own(key_heads=2)  # noqa: E731
    same(*(trained(few, pairs(), loss_of_decoder, how, adam=True) for how in (None, split)))
    for make in (llama, odd_heads):
        for batches in (packed(length=22), answers_only()):
            same(*(trained(make, batches, loss_of_transformer, how) for how in (None, split)))


@pytest.mark.world_size(2)
def test_models_of_transformers_train_as_on_one() -> None:
    split = split_of_all()
    plain, odd = ([causal(ids) for ids in tokens(length=length)] for length in (16, 21))
    with_mask = [causal(ids, attention_mask=torch.ones_like(ids)) for ids in tokens(length=21)]
    seen = torch.rand(2, 1, 16, 16, generator=torch.Generator().manual_seed(2)) > 0.3
    seen = (seen & torch.ones(16, 16, dtype=torch.bool).tril()) | torch.eye(16, dtype=torch.bool)
    explicit = [causal(ids, attention_mask=seen) for ids in tokens()]

    def recomputed() -> nn.Module:
        module: Any = llama()
        module.gradient_checkpointing_enable()
        return module.train()  # type: ignore[no-any-return]

    for make, kinds in (
        (llama, (plain, packed(), padded("right"), padded("left"), padded("within"), answers_only(), explicit)),
        # Lengths that do not divide.
        (llama, (odd, with_mask, packed(length=21))),
        (odd_heads, (plain, packed(), padded("left"), padded("within"), explicit)),
        (recomputed, (packed(),)),
        # Sliding windows, learned positions, attention to both sides.
        (mistral, (plain, packed(), padded("left"), padded("within"))),
        (gpt2, (padded("right"),)),
        (bert, (padded("right"), odd)),
    ):
        for batches in kinds:
            same(*(trained(make, batches, loss_of_transformer, how) for how in (None, split)))
    same(*(trained(llama, packed(), loss_of_transformer, how, adam=True) for how in (None, split)))
    what_a_model_is_given_by_mistake_is_refused(split)
    models_that_cannot_be_divided_are_refused(split)


class Encoder(nn.Module):
    """Layers of torch, in both orders of dimensions."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 24, dropout=0.0, batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.last = nn.MultiheadAttention(WIDTH, 1, kdim=8, vdim=8, batch_first=batch_first)
        self.narrow, self.out = nn.Linear(WIDTH, 8), nn.Linear(WIDTH, WORDS)
        self.batch_first = batch_first

    def forward(self, ids: Tensor, hidden: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        x = self.words(ids if self.batch_first else ids.T)
        x = self.encoder(x, mask, src_key_padding_mask=hidden)
        narrow = self.narrow(x)
        x = self.last(x, narrow, narrow, need_weights=False)[0]
        logits: Tensor = self.out(x if self.batch_first else x.transpose(0, 1))
        return logits


@pytest.mark.world_size(2)
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
def test_layers_of_torch_train_and_evaluate_as_on_one() -> None:
    split = split_of_all()
    hidden = torch.zeros(2, 16, dtype=torch.bool)
    hidden[0, 12:] = True
    causal_mask = nn.Transformer.generate_square_subsequent_mask(16)
    own_rows = causal_mask.double().narrow(0, split.rank * 8, 8)
    local = nn.Transformer.generate_square_subsequent_mask(8)

    def loss_of(module: nn.Module, batch: Any) -> Tensor:
        ids, targets, *masks = batch
        return F.cross_entropy(module(ids, *masks).flatten(0, 1), targets.flatten())

    for batch_first in (True, False):
        make = lambda first=batch_first: Encoder(first).double()  # noqa: E731
        for masks in ((), (hidden,), (None, causal_mask.double()), (hidden, causal_mask.double())):
            batches = [(*pair, *masks) for pair in pairs()]
            if len(masks) > 1:
                # What a model makes for its own tokens, and rows of the whole mask that the dataset has.
                split.names = (0, 1, 2)
                parts = [(*pair, masks[0], own_rows if masks[0] is not None else local.double()) for pair in pairs()]
            else:
                split.names, parts = None, batches
            one = trained(make, batches, loss_of)
            more = trained(make, parts, loss_of, split)
            same(one, more)
    module = one[0].eval()
    split.prepare(module)
    ids = tokens()[0]
    with torch.inference_mode():
        expected = Encoder.forward(copy.deepcopy(module), ids)  # Not active: whole sequences.
        with split.active():
            part = module(split_batch(ids, split.rank, 2))
            with context.whole_sequences():
                torch.testing.assert_close(module(ids), expected)
    torch.testing.assert_close(part, expected.chunk(2, 1)[split.rank], **CLOSE)


@pytest.mark.world_size(2)
def test_masks_of_attention_are_gathered_or_cut() -> None:
    split = split_of_all()
    generator = torch.Generator().manual_seed(3)
    q, k, v = torch.randn(3, 2, HEADS, 8, 4, generator=generator, dtype=torch.float64).unbind()
    bias = torch.randn(HEADS, 8, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    keys = torch.tensor([True] * 6 + [False] * 2).expand(2, 1, 1, 8)
    here = slice(4 * split.rank, 4 * split.rank + 4)
    own_rows = bias.detach()[:, here].clone().requires_grad_()
    expected = F.scaled_dot_product_attention(q, k, v, bias)
    expected.pow(2).sum().backward()
    mine = [each[:, :, here] for each in (q, k, v)]
    with split.active():
        torch.testing.assert_close(attention(*mine, bias), expected[:, :, here])
        torch.testing.assert_close(attention(*mine, own_rows), expected[:, :, here])
        torch.testing.assert_close(attention(*mine, keys), F.scaled_dot_product_attention(q, k, v, keys)[:, :, here])
        attention(*mine, own_rows).pow(2).sum().backward()
        torch.testing.assert_close(own_rows.grad, bias.grad[:, here])  # type: ignore[index]
        with refused(ValueError, "attn_mask", fix="all 8 keys"):
            attention(*mine, bias[:, :4, :4])
        # Three heads for two processes, and one head.
        for few in (slice(0, 3), slice(3, 4)):
            expected = F.scaled_dot_product_attention(q[:, few], k[:, few], v[:, few], bias[few])
            attended = attention(*(each[:, few] for each in mine), own_rows[few])
            torch.testing.assert_close(attended, expected[:, :, here])
        # Queries of one length, and keys of another.
        longer = attention(mine[0][:, :, :2], *mine[1:])
        both = F.scaled_dot_product_attention(torch.cat([q[:, :, :2], q[:, :, 4:6]], 2), k, v)
        torch.testing.assert_close(longer, both.chunk(2, 2)[split.rank])


# -- what is refused


class Own(nn.Module):
    """Attends as it is told."""

    def __init__(self, attend: Any) -> None:
        super().__init__()
        self.attend = attend

    def forward(self, x: Tensor) -> Any:
        return self.attend(x, x, x)


class CallsTorch(Own):
    def forward(self, x: Tensor) -> Any:
        return _helper(x)


def _helper(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x)


@pytest.mark.world_size(2)
def test_modules_that_cannot_be_divided_are_refused() -> None:
    split = split_of_all()
    for module, argument, says in (
        (CallsTorch(None), "", "CallsTorch calls scaled_dot_product_attention"),
        (Own(None), "", "no attention"),
        (nn.Sequential(nn.LSTM(4, 4)), "", "0 (LSTM)"),
        (nn.Sequential(nn.Conv1d(4, 4, 3)), "", "0 (Conv1d)"),
        (nn.Sequential(nn.MultiheadAttention(4, 2, add_zero_attn=True)), "", "add_zero_attn"),
    ):
        with refused(ValueError, argument, says=says):
            split.prepare(module)
    with refused(ValueError, "batch", fix="multiple of 2", says="21 tokens"):
        trained(own, pairs(length=21), loss_of_decoder, split)


def models_that_cannot_be_divided_are_refused(split: ContextSplit) -> None:
    for module, says in (
        (of_transformers("Bert", "ForSequenceClassification"), "ForSequenceClassification"),
        (of_transformers("Roberta", "ForMaskedLM"), "positions from its tokens"),
        (of_transformers("T5", "ForConditionalGeneration", d_model=8, num_layers=1), "an encoder"),
    ):
        with refused(ValueError, "context", says=says):
            split.prepare(module)


def what_a_model_is_given_by_mistake_is_refused(split: ContextSplit) -> None:
    module: Any = of_transformers("Llama", use_cache=True)
    before = module.config._attn_implementation
    split.prepare(module)
    batch = causal(tokens()[0])
    prompt = batch["input_ids"][:, :4]
    with split.active():
        part = split.split(batch)
        without = {name: value for name, value in part.items() if name != "shift_labels"}
        with refused(ValueError, "labels", fix="shift_labels=batch['shift_labels']"):
            module(**without)
        with refused(ValueError, says="attention_mask of shape (2, 16)"):
            module(part["input_ids"], torch.ones(2, 16))
        with refused(ValueError, fix="whole_sequences()"):
            module.generate(prompt, max_new_tokens=2)
        with context.whole_sequences():
            text = module.generate(prompt, max_new_tokens=2, do_sample=False)
        # A model that is given less than the batch has: its positions go on from those of the process before.
        alone = module(part["input_ids"]).logits
    split.release()
    assert module.config._attn_implementation == before
    assert torch.equal(text, module.generate(prompt, max_new_tokens=2, do_sample=False))
    whole = module(batch["input_ids"]).logits
    torch.testing.assert_close(alone, whole.chunk(2, 1)[split.rank], **CLOSE)


def test_arguments_of_attention_that_exclude_each_other_are_refused() -> None:
    q = torch.randn(1, 2, 4, 4)
    documents = find_documents(torch.arange(4)[None])
    with refused(ValueError, fix="attn_mask"):
        attention(q, q, q, torch.ones(4, 4), documents=documents)
    with refused(ValueError, "window", fix="is_causal=True"):
        attention(q, q, q, window=2)


# -- the batch


def test_each_tensor_with_the_length_of_the_sequence_is_cut() -> None:
    Batch = namedtuple("Batch", "ids extra")
    ids = torch.arange(12).view(2, 6)
    batch = Batch(ids, {"features": torch.rand(2, 6, 3), "lengths": torch.tensor([6, 6]), "other": torch.rand(2, 5)})
    parts = [split_batch(batch, rank, 2) for rank in range(2)]
    assert torch.equal(torch.cat([part.ids for part in parts], 1), ids)
    assert torch.equal(torch.cat([part.extra["features"] for part in parts], 1), batch.extra["features"])
    assert parts[0].extra["lengths"] is batch.extra["lengths"]
    assert parts[0].extra["other"] is batch.extra["other"]
    assert isinstance(parts[0], Batch)
    time_first = split_batch((ids.T, torch.arange(6)), 1, 3, sequence_dim=0)
    assert time_first[0].tolist() == [[2, 8], [3, 9]]
    assert len(time_first[1]) == 6
    assert split_batch({"label": torch.tensor([1, 2])}, 0, 2)["label"].tolist() == [1, 2]


def test_entries_can_be_named() -> None:
    square = torch.arange(16).view(4, 4)
    part = split_batch((square, square), 1, 2, names=[0])
    assert part[0].shape == (4, 2)
    assert part[1] is square
    by_key = split_batch({"ids": square, "table": square}, 0, 2, names=["ids"])
    assert by_key["ids"].shape == (4, 2)
    assert by_key["table"] is square
    with refused(ValueError, "names", fix="'ids'"):
        split_batch({"ids": square}, 0, 2, names=["tokens"])


def test_labels_are_shifted_before_the_cut_and_positions_are_made() -> None:
    ids = torch.arange(1, 13).view(2, 6)
    batch = UserDict({"input_ids": ids, "labels": ids})  # As what a tokenizer of transformers returns.
    parts = [split_batch(batch, rank, 3, shift=True) for rank in range(3)]
    assert isinstance(parts[0], UserDict)
    assert "shift_labels" not in batch
    shifted = torch.cat([part["shift_labels"] for part in parts], 1)
    assert shifted.tolist() == [[2, 3, 4, 5, 6, -100], [8, 9, 10, 11, 12, -100]]
    assert [part["position_ids"][1].tolist() for part in parts] == [[0, 1], [2, 3], [4, 5]]
    # A tokenizer's own positions and shifted labels stay.
    given = batch.data | {"position_ids": ids, "shift_labels": ids}
    assert torch.equal(split_batch(given, 0, 1, shift=True)["shift_labels"], ids)


def test_padding_has_no_labels_and_is_a_document_of_its_own() -> None:
    ids = torch.arange(1, 6)[None]
    batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids), "weights": torch.ones(1, 5)}
    last = split_batch(batch, 1, 2, shift=True, pad=True)
    assert {name: value.tolist() for name, value in last.items()} == {
        "input_ids": [[4, 5, 0]],
        "labels": [[4, 5, -100]],
        "shift_labels": [[5, -100, -100]],
        "attention_mask": [[1, 1, 0]],
        "weights": [[1.0, 1.0, 0.0]],
        "position_ids": [[3, 4, 0]],
    }


def test_documents_begin_with_their_positions_or_with_padding() -> None:
    assert find_documents(torch.tensor([[4, 5, 6], [0, 1, 2]])).bounds is None
    assert find_documents(torch.tensor([[0, 1, 0], [0, 0, 1]])).places == [0, 2, 3, 4, 6]
    # As in transformers, a mask says that each row is one document.
    ones = torch.ones(1, 4, dtype=torch.long)
    assert find_documents(torch.tensor([[0, 1, 0, 1]]), ones).bounds is None
    assert find_documents(torch.arange(4)[None], torch.tensor([[0, 0, 1, 1]])).places == [0, 2, 4]
    within = find_documents(torch.arange(4)[None], torch.tensor([[1, 0, 1, 1]]))
    assert within.keys is not None
    assert within.keys.flatten().tolist() == [True, False, True, True]


def test_without_context_parallel_attention_is_that_of_torch() -> None:
    q, k, v = torch.randn(3, 2, HEADS, 12, 4, dtype=torch.float64).unbind()
    assert torch.equal(attention(q, k, v, is_causal=True), F.scaled_dot_product_attention(q, k, v, is_causal=True))
    age = torch.arange(12)[:, None] - torch.arange(12)
    seen = (age >= 0) & (age < 5)
    torch.testing.assert_close(
        attention(q, k, v, is_causal=True, window=5), F.scaled_dot_product_attention(q, k, v, seen)
    )
    positions = torch.tensor([[0, 1, 2, *range(9)], [*range(7), *range(5)]])
    number = (positions == 0).cumsum(1)
    together = (number[:, None, :, None] == number[:, None, None, :]) & seen
    documents = find_documents(positions)
    torch.testing.assert_close(
        attention(q, k, v, is_causal=True, window=5, documents=documents),
        F.scaled_dot_product_attention(q, k, v, together),
    )

"""Packed rows: the same losses and gradients as padded ones, and no look across a boundary."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils.data import DataLoader

from hasten.batching.samplers import rows_of
from hasten.data import PackCollator, PackedBatchSampler, PadCollator, pack, packed_attention, pad_collate
from hasten.data.memory.read import same
from tests.batching.sequences import LONGEST, Sequences, Transformer, lengths_of
from tests.refusals import refused

LENGTHS = [3, 5, 5, 1]


def test_no_token_of_another_document_changes_a_documents_result() -> None:
    model = Transformer(causal=True)
    one = pack([torch.tensor([1, 2, 3]), torch.tensor([4, 5])], max_length=8)
    other = pack([torch.tensor([9, 8, 7]), torch.tensor([4, 5])], max_length=8)
    assert torch.equal(model(one)[0, 3:5], model(other)[0, 3:5])
    assert not torch.allclose(model(one)[0, :3], model(other)[0, :3])


@pytest.mark.parametrize("max_length", [None, 40])
def test_per_sample_losses_and_gradients_are_those_of_padded_training(max_length: int | None) -> None:
    model, samples = Transformer(), [Sequences()[index] for index in range(10)]
    padded = model.sample_losses(pad_collate(samples))
    gradients = torch.autograd.grad(padded.mean(), list(model.parameters()))
    batch = pack(samples, max_length, next_token=False)
    packed = model.sample_losses(batch)
    assert torch.allclose(packed, padded[batch["document_order"]], atol=1e-5)
    for mine, theirs in zip(torch.autograd.grad(packed.mean(), list(model.parameters())), gradients, strict=True):
        assert torch.allclose(mine, theirs, atol=1e-5)


def test_next_token_losses_are_those_of_padded_training_and_cross_no_boundary() -> None:
    model = Transformer(causal=True)
    samples = [{"input_ids": Sequences()[index]["input_ids"]} for index in range(10)]

    def loss(batch: dict[str, Any], labels: torch.Tensor) -> torch.Tensor:
        logits = model.head(model(batch))
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    padded = pad_collate(samples)
    expected = loss(padded, padded["input_ids"].masked_fill(padded["attention_mask"] == 0, -100))
    for batch in (pack(samples), pack(samples, 60), pack(samples, 60, rows=5)):
        assert torch.allclose(loss(batch, batch["labels"]), expected, atol=1e-5)
        first = batch["labels"].flatten()[batch["document_starts"]]
        assert first.tolist() == [-100] * 10


def test_models_that_take_a_mask_get_one() -> None:
    model, samples = Transformer(), [Sequences()[index] for index in range(6)]
    batch = PackCollator(30, mask="full", next_token=False)(samples)
    expected = model(batch)
    q = torch.randn((*batch["input_ids"].shape, 1, 8))
    seen = functional.scaled_dot_product_attention(
        *(q.transpose(1, 2),) * 3, attn_mask=batch["attention_mask"]
    ).transpose(1, 2)
    flat = packed_attention(*(q.flatten(0, 1),) * 3, batch["cu_seqlens"], batch["max_seqlen"])
    real = batch["document_ids"] >= 0
    assert torch.allclose(seen[real], flat.unflatten(0, q.shape[:2])[real], atol=1e-5)
    assert expected.isfinite().all()
    with refused(ValueError, says=("'label'", "next_token=False")):
        PackCollator(30)(samples)
    samples = [{"input_ids": sample["input_ids"]} for sample in samples]
    assert PackCollator(30)(samples)["attention_mask"].triu(1).sum() == 0
    assert "attention_mask" not in PackCollator(30, mask=None)(samples)


def test_a_hugging_face_model_has_the_loss_of_padded_batches() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=30,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    samples = [{"input_ids": Sequences()[index]["input_ids"]} for index in range(6)]
    padded = pad_collate(samples)
    labels = padded["input_ids"].masked_fill(padded["attention_mask"] == 0, -100)
    expected = model(**padded, labels=labels).loss
    packed = PackCollator(40)(samples)
    taken = ("input_ids", "position_ids", "attention_mask", "labels")
    assert torch.allclose(model(**{key: packed[key] for key in taken}).loss, expected, atol=1e-5)


def test_every_token_is_somewhere_and_positions_start_at_0() -> None:
    samples = [{"input_ids": torch.arange(length) + 1, "types": torch.ones(length), "y": length} for length in LENGTHS]
    batch = pack(samples, max_length=9, rows=3)
    assert batch["input_ids"].shape == batch["labels"].shape == batch["types"].shape == (3, 9)
    real = batch["document_ids"] >= 0
    assert real.sum() == sum(LENGTHS)
    assert torch.equal(batch["position_ids"][real], batch["input_ids"][real] - 1)
    assert batch["types"].sum() == sum(LENGTHS)
    assert batch["y"].tolist() == [LENGTHS[place] for place in batch["document_order"]]
    starts = batch["document_starts"]
    assert batch["input_ids"].flatten()[starts].tolist() == [1] * 4
    sizes = batch["cu_seqlens"].diff()
    assert batch["cu_seqlens"][-1] == 27
    assert int(sizes.max()) == batch["max_seqlen"] == 9  # the empty row
    assert sorted(sizes.tolist())[:1] > [0]


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_of_samples_is_left_out(side: Any) -> None:
    samples = [{"input_ids": [1, 2], "labels": [5, 6], "y": 0}, {"input_ids": [3, 4, 7], "labels": [8, 9, 9], "y": 1}]
    samples.append({"input_ids": [], "labels": [], "y": 2})
    padded = PadCollator(multiple_of=4, side=side, keys=["input_ids", "labels"])(samples)
    rows = [{key: values[place] for key, values in padded.items()} for place in range(3)]
    assert all(len(row["input_ids"]) == 4 for row in rows)
    assert same(pack(rows, 8), pack(samples, 8))


@pytest.mark.parametrize("kind", [torch.uint8, torch.bool])
def test_labels_of_a_type_without_the_ignored_label_get_another(kind: torch.dtype) -> None:
    samples = [{"input_ids": [1, 2], "labels": torch.tensor([1, 0], dtype=kind)}, {"input_ids": [3], "labels": [1]}]
    assert pack(samples, 4)["labels"].tolist() == [[-100, 0, -100, -100]]
    assert pack(samples, 4, next_token=False)["labels"].tolist() == [[1, 0, 1, -100]]
    assert pad_collate(samples)["labels"].tolist() == [[1, 0], [1, -100]]


def test_tokens_of_16_bits_without_sign() -> None:
    samples = [{"input_ids": torch.tensor(each, dtype=torch.uint16)} for each in ([5, 60000], [7])]
    for batch in (pack(samples, 4), pad_collate(samples)):
        assert batch["input_ids"].dtype == torch.uint16
        assert batch["input_ids"].flatten()[:2].tolist() == [5, 60000]


def test_a_field_has_a_type_for_all_samples() -> None:
    samples = [{"input_ids": [], "w": []}, {"input_ids": [2**24 + 1], "w": [1]}, {"input_ids": [3], "w": [0.5]}]
    for batch in (pack(samples), pad_collate(samples)):
        assert batch["input_ids"].flatten().unique().tolist()[-1] == 2**24 + 1
        assert batch["w"].flatten().unique().tolist()[-2:] == [0.5, 1.0]


def test_labels_of_tokens_stay_where_the_task_is_another() -> None:
    samples = [{"input_ids": [1, 2], "labels": [5, 6]}, {"input_ids": [3], "labels": [7]}]
    assert pack(samples, next_token=False)["labels"].tolist() == [[5, 6, 7]]
    assert pack(samples)["labels"].tolist() == [[-100, 6, -100]]
    assert pack(samples, multiple_of=4)["labels"].tolist() == [[-100, 6, -100, -100]]


def test_batches_of_the_sampler_have_one_shape_and_every_sample_once() -> None:
    lengths, data = lengths_of(40), Sequences()
    loader: Any = DataLoader(
        data, batch_sampler=PackedBatchSampler(lengths, 32, 2), collate_fn=PackCollator(32, rows=2, next_token=False)
    )
    model = Transformer()
    alone = [model.sample_losses(pad_collate([data[index]])).item() for index in range(40)]
    for _ in range(2):
        seen: list[int] = []
        for batch in loader:
            assert batch["input_ids"].shape == (2, 32)
            for index, loss in zip(batch["index"].tolist(), model.sample_losses(batch).tolist(), strict=True):
                seen.append(index)
                assert loss == pytest.approx(alone[index], abs=1e-5)
        assert sorted(seen) == list(range(40))


def test_rows_hold_no_more_than_they_may_and_are_few() -> None:
    lengths = lengths_of(300)
    rows = rows_of(lengths, LONGEST)
    assert sorted(place for row in rows for place in row) == list(range(300))
    assert max(sum(lengths[place] for place in row) for row in rows) <= LONGEST
    assert len(rows) <= sum(lengths) / LONGEST * 1.05 + 1

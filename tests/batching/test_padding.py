"""Dynamic padding: nothing is lost, nothing is made up, and no batch is wider than it must be."""

from __future__ import annotations

import warnings
from collections import namedtuple
from typing import Any

import pytest
import torch

from hasten.batching.fields import FitWidth
from hasten.data import PadCollator, pad_collate
from tests.refusals import refused, warned

IDS = [torch.tensor([5, 6, 7]), torch.tensor([8]), torch.tensor([9, 9])]


def test_dicts_get_their_sequences_padded_a_mask_and_their_labels_ignored_where_nothing_is() -> None:
    batch = pad_collate([{"input_ids": ids, "labels": ids + 1, "weight": 0.5} for ids in IDS])
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 0, 0], [9, 9, 0]]
    assert batch["labels"].tolist() == [[6, 7, 8], [9, -100, -100], [10, 10, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0], [1, 1, 0]]
    assert batch["weight"].tolist() == [0.5, 0.5, 0.5]


def test_batches_whose_samples_happen_to_be_equally_long_are_no_exception() -> None:
    batch = PadCollator(multiple_of=4)([{"input_ids": [1, 2], "label": 1}, {"input_ids": [3, 4], "label": 0}])
    assert batch["input_ids"].tolist() == [[1, 2, 0, 0], [3, 4, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 0, 0]]
    assert batch["label"].tolist() == [1, 0]


def test_a_batch_with_an_undecided_field_is_not_widened() -> None:
    six = [{"input_ids": torch.arange(6), "features": torch.ones(6)}] * 2
    apart = [*six, {"input_ids": torch.arange(9), "features": torch.ones(6)}]
    collate = PadCollator(multiple_of=8)
    for samples, width in ((six, 6), (apart, 16), (six, 6)):  # A batch is joined alike whatever came before.
        batch = collate(samples)
        assert batch["features"].shape == (len(samples), 6)
        assert batch["input_ids"].shape == batch["attention_mask"].shape == (len(samples), width)
    assert PadCollator(multiple_of=8, keys=["input_ids"])(six)["input_ids"].shape == (2, 8)
    assert PadCollator(multiple_of=8, keys=["input_ids", "features"])(six)["features"].shape == (2, 8)
    labels = PadCollator(multiple_of=8)([{"input_ids": [1, 2], "labels": torch.eye(2)[1]}])["labels"]
    assert labels.tolist() == [[0.0, 1.0]]
    tags = PadCollator(multiple_of=8)([{"input_ids": [1, 2], "labels": [3, 4]}])["labels"]
    assert tags.tolist() == [[3, 4] + [-100] * 6]


def test_whole_numbers_that_may_be_classes_are_not_padded_in_silence(monkeypatch: Any) -> None:
    monkeypatch.setattr("hasten._lib.rank_zero._warned", {})
    samples = [{"input_ids": ids, "tags": ids} for ids in IDS]
    with warned(UserWarning, says=("'tags'", "int64", "with 0", "padding={'tags'")):
        pad_collate(samples)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert PadCollator(padding={"tags": -100})(samples)["tags"][1].tolist() == [8, -100, -100]
        pad_collate([{"input_ids": ids, "special_tokens_mask": ids, "speed": ids.float()} for ids in IDS])


def test_tuples_and_bare_sequences_keep_their_kind() -> None:
    Pair = namedtuple("Pair", ["ids", "y"])
    pairs = pad_collate([Pair(ids, 1) for ids in IDS])
    assert type(pairs) is Pair
    assert pairs.ids.shape == (3, 3)
    _, y = pad_collate([(ids, ids * 0 + 1) for ids in IDS])
    assert y.sum() == 6
    assert pad_collate(IDS).tolist() == [[5, 6, 7], [8, 0, 0], [9, 9, 0]]
    frames = pad_collate([torch.ones(length, 4) for length in (2, 5)])
    assert frames.shape == (2, 5, 4)
    assert frames.sum() == 28


def test_padding_value_side_and_keys_are_as_asked() -> None:
    collate = PadCollator(padding={"input_ids": 1, "labels": 0}, side="left", multiple_of=(2, 4))
    batch = collate([{"input_ids": ids, "labels": ids} for ids in IDS])
    assert batch["input_ids"].tolist() == [[1, 5, 6, 7], [1, 1, 1, 8], [1, 1, 9, 9]]
    assert batch["labels"][1].tolist() == [0, 0, 0, 8]
    assert batch["attention_mask"][1].tolist() == [0, 0, 0, 1]
    only = PadCollator(keys=["a"], mask_key=None)([{"a": ids, "pair": torch.tensor([1, 2])} for ids in IDS])
    assert only["a"].shape == (3, 3)
    assert only["pair"].tolist() == [[1, 2]] * 3
    assert set(only) == {"a", "pair"}


def test_masks_are_kept_and_fields_of_another_length_padded_to_their_own_longest() -> None:
    batch = pad_collate(
        [{"input_ids": ids, "attention_mask": ids.ne(6).long(), "labels": torch.arange(len(ids) * 2)} for ids in IDS]
    )
    assert batch["attention_mask"].tolist() == [[1, 0, 1], [1, 0, 0], [1, 1, 0]]
    assert batch["labels"].shape == (3, 6)
    assert batch["labels"][1].tolist() == [0, 1, -100, -100, -100, -100]


def test_the_users_collate_function_gets_samples_of_one_length() -> None:
    def own(samples: list[Any]) -> Any:
        return {"x": torch.stack([sample["input_ids"] for sample in samples]), "names": [s["name"] for s in samples]}

    batch = PadCollator(collate_fn=own)([{"input_ids": ids, "name": str(len(ids))} for ids in IDS])
    assert batch["x"].shape == (3, 3)
    assert batch["names"] == ["3", "1", "2"]


def tokenizer(**options: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = {"[PAD]": 3, "[UNK]": 0, "good": 1, "film": 2}
    model = tokenizers.models.WordLevel(words, unk_token="[UNK]")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(model), unk_token="[UNK]", **{"pad_token": "[PAD]", **options}
    )


@pytest.mark.parametrize("side", ["right", "left"])
def test_a_hugging_face_tokenizer_pads_by_its_own_rules(side: str, recwarn: Any) -> None:
    collate = PadCollator(tokenizer(padding_side=side), multiple_of=4)
    samples = [{"input_ids": [1, 2, 1], "label": 1}, {"input_ids": [2], "label": 0}]
    batch = collate(samples)
    row = [2, 3, 3, 3] if side == "right" else [3, 3, 3, 2]
    assert batch["input_ids"][1].tolist() == row
    assert batch["attention_mask"][1].tolist() == [int(token != 3) for token in row]
    assert batch["labels"].tolist() == [1, 0]
    tags = collate([{"input_ids": [1, 2], "labels": [7, 8]}, {"input_ids": [2], "labels": [9]}])["labels"]
    assert tags[1].tolist() == [9 if token == 2 else -100 for token in row]
    assert not recwarn.list
    with refused(ValueError, "tokenizer", fix="tokenizer.pad_token"):
        PadCollator(tokenizer(pad_token=None))


def padded(width: int = 8) -> dict[str, torch.Tensor]:
    """Two samples of 3 and 2 tokens, padded to ``width``."""
    mask = torch.zeros(2, width, dtype=torch.long)
    mask[0, :3] = mask[1, :2] = 1
    ids = torch.arange(1, 2 * width + 1).view(2, width) * mask
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": ids.masked_fill(mask == 0, -100),
        "soft": torch.rand(2, 5),
        "square": torch.ones(2, 1, width, width, dtype=torch.bool),
        "vectors": torch.rand(2, width, width) * mask[..., None],
    }


def test_padding_that_no_sample_needs_is_cut_from_every_field_over_tokens() -> None:
    given = padded()
    names = ("input_ids", "labels", "square", "vectors")
    batch = FitWidth(lambda samples: given, over_tokens=names)([])
    shapes = {key: tuple(value.shape) for key, value in batch.items()}
    assert shapes == {
        "input_ids": (2, 3),
        "attention_mask": (2, 3),
        "labels": (2, 3),
        "soft": (2, 5),
        "square": (2, 1, 3, 3),
        "vectors": (2, 3, 8),
    }
    assert given["input_ids"].shape == (2, 8)
    assert torch.equal(batch["input_ids"], given["input_ids"][:, :3])
    assert FitWidth(lambda samples: given)([]) is given
    assert FitWidth(lambda samples: "no batch", over_tokens=names)([]) == "no batch"


def test_batches_are_filled_up_to_one_of_few_widths_and_never_beyond_the_limit() -> None:
    def narrow(samples: Any) -> Any:
        return {key: padded(3)[key] for key in ("input_ids", "attention_mask", "labels")}

    names = ("input_ids", "labels")
    batch = FitWidth(narrow, multiple_of=(4, 8), over_tokens=names)([])
    assert batch["input_ids"].shape == (2, 4)
    assert batch["attention_mask"][0].tolist() == [1, 1, 1, 0]
    assert batch["labels"][0, 3] == -100
    assert FitWidth(narrow, multiple_of=8, limit=5, over_tokens=names)([])["labels"].shape == (2, 5)


def test_fields_are_filled_up_with_what_pads_them_or_not_at_all() -> None:
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    tags = torch.tensor([[4, 5, 6], [7, -1, -1]])

    def fitted(**fields: Any) -> Any:
        return FitWidth(lambda samples: {"attention_mask": mask, **fields}, multiple_of=4, over_tokens=tuple(fields))(
            []
        )

    assert fitted(tags=tags)["tags"].tolist() == [[4, 5, 6, -1], [7, -1, -1, -1]]
    assert fitted(position_ids=torch.arange(3).expand(2, 3))["position_ids"].tolist() == [[0, 1, 2, 0]] * 2
    # Nothing tells what would pad these: a loss might count it.
    mask = torch.ones(2, 3, dtype=torch.long)
    assert fitted(tags=tags)["attention_mask"].shape == (2, 3)
    assert fitted(input_ids=tags)["attention_mask"].shape == (2, 4)
    assert fitted(seen=torch.ones(2, 3, 3, dtype=torch.bool))["attention_mask"].shape == (2, 3)


def test_what_the_loss_counts_is_not_cut() -> None:
    def width_of(given: Any, *names: str) -> int:
        return int(FitWidth(lambda samples: given, over_tokens=("input_ids", "labels", *names))([])["labels"].size(1))

    given = padded()
    given["labels"][1, 5] = 4
    given["decoder_attention_mask"] = torch.ones(2, 8, dtype=torch.long).tril(5)
    assert width_of(given, "decoder_attention_mask") == 7
    given["labels"][1, 5] = -1  # no class either
    assert width_of(given) == 3
    given["targets"] = torch.arange(16).view(2, 8)  # as wide as the mask, and no padding in it
    assert width_of(given, "targets") == 8
    # Cutting would move its positions.
    assert width_of({key: value.flip(1) if value.dim() == 2 else value for key, value in padded().items()}) == 8


def test_batches_keep_their_type() -> None:
    transformers = pytest.importorskip("transformers")
    encoding = FitWidth(lambda samples: transformers.BatchEncoding(padded()), over_tokens=("input_ids",))([])
    assert type(encoding) is transformers.BatchEncoding
    assert encoding["input_ids"].shape == (2, 3)
    given = padded()
    listed = FitWidth(
        lambda samples: [given["input_ids"], given["attention_mask"], torch.ones(2)], mask_key=1, over_tokens=(0, 1)
    )([])
    assert isinstance(listed, list)
    assert [tuple(each.shape) for each in listed] == [(2, 3), (2, 3), (2,)]

"""Where the pretrained models come from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.programs import fork_python
from tests.refusals import refused

from hasten_tools.demo import text_models as models
from hasten_tools.demo.text import Imdb

from .conftest import silent


def test_minilm_comes_from_its_package_with_pretrained_weights_ready_to_train() -> None:
    source = models.find("minilm")
    assert source.weights is not None
    torch.manual_seed(0)
    model = source.build()
    # `from_pretrained` gives it in evaluation: a Trainer would train without dropout, the plain loop with it.
    assert all(module.training for module in model.modules())
    one = model.state_dict()
    torch.manual_seed(1)
    other = source.build().state_dict()
    # Only the new last layer is random: the rest was read.
    assert [name for name in one if not torch.equal(one[name], other[name])] == ["classifier.weight"]
    unread = models.find("minilm", random_weights=True)
    assert "random weights" in unread.title
    model = unread.build()
    assert all(module.training for module in model.modules())
    random = model.state_dict()
    assert {name: value.shape for name, value in random.items()} == {name: value.shape for name, value in one.items()}
    name = "bert.encoder.layer.0.output.dense.weight"
    assert not torch.equal(random[name], one[name])


@pytest.mark.parametrize("name", ["minilm", "distilbert"])
def test_attention_dropout_and_the_lower_half_can_be_left_out_of_each_model(name: str) -> None:
    source = models.find(name, random_weights=True)
    field = source.attention_dropout_field
    model: Any = source.build(**{field: 0.0})
    assert getattr(model.config, field) == 0.0
    model = source.build()
    assert getattr(model.config, field) == 0.1
    source.freeze_lower_half(model)
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert not any("embeddings" in name or f"layer.{number}." in name for name in trained for number in range(3))
    assert all(any(f"layer.{number}." in name for name in trained) for number in range(3, 6))
    assert any("classifier" in name for name in trained)


def test_tokens_are_cut_and_framed() -> None:
    short, long = models.find("minilm").tokenize(["a film", "a film " * 50], max_length=12)
    assert len(short) == 4
    assert len(long) == 12
    assert short[0] == long[0] == 101
    assert short[-1] == long[-1] == 102


def test_a_missing_package_names_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "MINILM_PACKAGE", "gt_no_such_package")
    with refused(ModuleNotFoundError, says=("MiniLM", "gt_no_such_package")):
        models.find("minilm")


def test_random_weights_go_without_the_package_of_the_vocabulary(
    monkeypatch: pytest.MonkeyPatch, archive: Path, tmp_path: Path
) -> None:
    texts = ["A film to remember, said the critics of the paper!", "Dull. " * 80]
    usual = models.find("distilbert", random_weights=True).tokenize(texts, max_length=64)
    monkeypatch.setattr(models, "MINILM_PACKAGE", "gt_no_such_package")
    source = models.find("distilbert", random_weights=True)
    found = source.tokenize(texts, max_length=64)
    assert [len(tokens) for tokens in found] == pytest.approx([len(tokens) for tokens in usual], abs=2)
    assert source.tokenizer_key(64) != source.tokenizer_key(32)
    model: Any = source.build()
    assert all(0 < token < model.config.vocab_size for tokens in found for token in tokens)
    assert [tokens[:1] + tokens[-1:] for tokens in found] == [tokens[:1] + tokens[-1:] for tokens in usual]
    task = Imdb(archive, source, max_length=16, cache=tmp_path / "cache", say=silent)
    assert task.title.startswith(
        "DistilBERT (66 M parameters), random weights, hashed words in place of its vocabulary,"
    )


def test_distilbert_without_network_names_what_works_offline(archive: Path, tmp_path: Path) -> None:
    # A process of its own: the hub library reads these variables once, at its import.
    done = fork_python(
        *("-m", "hasten", "demo", "--task", "imdb", "--model", "distilbert", "--data", archive),
        *("--output", tmp_path / "out", "--cache-dir", tmp_path / "cache"),
        HF_HUB_OFFLINE="1",
        HF_HOME=str(tmp_path),
    )
    assert done.returncode == 1
    assert "--model minilm" in done.stderr
    assert "--random-weights" in done.stderr
    assert "Traceback" not in done.stderr

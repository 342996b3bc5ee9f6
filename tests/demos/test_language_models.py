"""The demo language models, and the text they read."""

from __future__ import annotations

import io
import math
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch

from hasten.demos import LightningLSTM, LightningTransformer, SequenceSampler, SimpleLSTM, Transformer, WikiText2
from hasten.demos.transformer import URL, Dictionary, tokenize
from tests.models import quiet
from tests.refusals import refused


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder data/ with a text of 40 lines, seen as ./data from here."""
    folder = tmp_path / "data"
    folder.mkdir()
    lines = [" ".join(f"w{(line * 3 + i) % 11}" for i in range(20)) for line in range(40)]
    (folder / "wikitext-2.txt").write_text("\n".join(lines) + "\n")
    monkeypatch.chdir(tmp_path)
    return folder


def no_network(*_: Any, **__: Any) -> Any:
    raise urllib.error.URLError("no route to host")


def test_words_are_numbered_as_they_come(tmp_path: Path) -> None:
    dictionary = Dictionary()
    assert [dictionary.add_word(word) for word in ["a", "b", "a", "c"]] == [0, 1, 0, 2]
    assert (dictionary.idx2word, dictionary.word2idx, len(dictionary)) == (["a", "b", "c"], {"a": 0, "b": 1, "c": 2}, 3)
    (tmp_path / "t.txt").write_text("a b\n\nb c")
    numbers, dictionary = tokenize(tmp_path / "t.txt")
    assert numbers.dtype == torch.int64
    assert [dictionary.idx2word[i] for i in numbers] == ["a", "b", "<eos>", "<eos>", "b", "c", "<eos>"]


def test_blocks_and_what_follows_them(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(urllib.request, "urlopen", no_network)  # the file is there: nothing is fetched
    data = WikiText2(text, block_size=7)
    assert len(data) == 40 * 21 // 7 - 1
    inputs, target = data[3]
    assert torch.equal(inputs, data.data[21:28])
    assert torch.equal(target, data.data[22:29])
    assert data.vocab_size == 12
    assert WikiText2().block_size == 35


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with refused(FileNotFoundError, "data_dir", says="download=False"):
        WikiText2(tmp_path, download=False)


def test_the_text_is_fetched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched = []

    def answer(url: str, timeout: float) -> Any:
        fetched.append(url)
        return io.BytesIO(b"the cat sat on the mat\n" * 20)

    monkeypatch.setattr(urllib.request, "urlopen", answer)
    for _ in range(2):
        data = WikiText2(tmp_path / "new" / "folder")
        assert (data.vocab_size, data.path) == (6, tmp_path / "new" / "folder" / "wikitext-2.txt")
    assert fetched == [URL]


@pytest.mark.parametrize("kind", [LightningTransformer, LightningLSTM])
def test_without_a_network_prepare_data_says_where_to_put_the_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(urllib.request, "urlopen", no_network)
    with pytest.raises(RuntimeError, match=r"could not be reached .*no route to host.*Put the text at .*wikitext-2"):
        kind(vocab_size=12).prepare_data()


def test_the_transformer_does_not_see_what_follows() -> None:
    torch.manual_seed(0)
    model = Transformer(vocab_size=20, ninp=8, nhead=2, nhid=8, nlayers=1).eval()
    words = torch.randint(0, 20, (1, 6))
    changed = words.clone()
    changed[0, 4] = (changed[0, 4] + 1) % 20
    one, other = model(words, words), model(words, changed)
    assert tuple(one.shape) == (6, 20)
    assert torch.allclose(one[:4], other[:4])
    assert not torch.allclose(one[4:], other[4:])
    assert torch.allclose(one.exp().sum(1), torch.ones(6), atol=1e-5)
    everything = model(words, changed, torch.zeros(6, 6))
    assert not torch.allclose(everything[:4], other[:4])
    inf = float("inf")
    assert model.generate_square_subsequent_mask(3).tolist() == [[0, -inf, -inf], [0, 0, -inf], [0, 0, 0]]


def test_weights_have_the_names_of_lightnings_demo_and_positions_are_encoded_by_the_length() -> None:
    model = Transformer(vocab_size=9, ninp=4, nhid=4, nlayers=1, dropout=0.0)
    assert {name.split(".")[0] for name in model.state_dict()} == {"embedding", "transformer", "decoder"}
    offset = model.pos_encoder(torch.zeros(1, 3, 4))
    # At the frequencies 1 and 1/100, at the length 3: sine and cosine.
    expected = [math.sin(3), math.cos(3), math.sin(0.03), math.cos(0.03)]
    assert torch.allclose(offset, torch.tensor(expected).expand(1, 3, 4))


def test_the_transformer_trains(text: Path) -> None:
    torch.manual_seed(0)
    losses: list[float] = []

    class Watched(LightningTransformer):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            losses.append(outputs["loss"].item())

    model = Watched(vocab_size=12)
    trainer = quiet(max_epochs=2)
    trainer.fit(model)
    assert trainer.global_step == 2 * (40 * 21 // 35 - 1)
    assert isinstance(trainer.optimizers[0], torch.optim.SGD)
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.1
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


def test_sequences_go_on_from_batch_to_batch() -> None:
    sampler = SequenceSampler(range(11), batch_size=3)
    assert list(sampler) == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]
    assert len(sampler) == 3


def test_the_lstm_carries_its_state(text: Path) -> None:
    torch.manual_seed(0)
    model = LightningLSTM(vocab_size=12)
    model.model = SimpleLSTM(12, ninp=8, nhid=8, nlayers=2, dropout=0.0)
    assert [tuple(part.shape) for part in model.model.init_hidden(3)] == [(2, 3, 8), (2, 3, 8)]
    assert model.model.encoder.weight.abs().max() <= 0.1 >= model.model.decoder.weight.abs().max()
    assert model.model.decoder.bias.abs().sum() == 0
    batch = (torch.randint(0, 12, (3, 5)), torch.randint(0, 12, (3, 5)))
    model.log = lambda *_, **__: None  # type: ignore[method-assign, assignment]
    first = model.training_step(batch, 0)
    expected, hidden = model.model(batch[0], model.model.init_hidden(3))
    assert torch.equal(first, torch.nn.functional.nll_loss(expected, batch[1].flatten()))
    second = model.training_step(batch, 1)
    expected, _ = model.model(batch[0], hidden)
    assert torch.equal(second, torch.nn.functional.nll_loss(expected, batch[1].flatten()))
    model.on_train_epoch_end()
    assert torch.equal(model.training_step(batch, 2), first)


def test_the_lstm_trains(text: Path) -> None:
    (text / "wikitext-2.txt").write_text("a b c d e f g\n" * 150)
    torch.manual_seed(0)
    model = LightningLSTM(vocab_size=8)
    model.model = SimpleLSTM(8, ninp=8, nhid=8, nlayers=1, dropout=0.0)
    trainer = quiet(max_epochs=2)
    trainer.fit(model)
    assert trainer.global_step == 2 * ((150 * 8 // 35 - 1) // 20)
    assert trainer.optimizers[0].param_groups[0]["lr"] == 20.0
    assert trainer.callback_metrics["train_loss"] < 2.08
    assert model.hidden is None

"""The boring classes: what users' own tests build on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hasten.demos import boring_classes as boring
from tests.models import quiet, same_weights

STAGES = {"train": "fit", "val": "validate", "test": "test", "predict": "predict"}


def test_datasets_draw_what_they_say() -> None:
    torch.manual_seed(0)
    expected = torch.randn(5, 3)
    torch.manual_seed(0)
    random = boring.RandomDataset(3, 5)
    assert len(random) == 5
    assert all(torch.equal(random[i], expected[i]) for i in range(5))
    torch.manual_seed(0)
    dicts = boring.RandomDictDataset(3, 5)
    assert len(dicts) == 5
    assert torch.equal(dicts[1]["a"], expected[1])
    assert torch.equal(dicts[1]["b"], expected[1] + 2)


def test_iterable_datasets_draw_anew_each_time() -> None:
    torch.manual_seed(0)
    expected = [torch.randn(3) for _ in range(4)]
    torch.manual_seed(0)
    stream = boring.RandomIterableDataset(3, 2)
    assert all(torch.equal(a, b) for a, b in zip([*stream, *stream], expected, strict=True))
    assert not hasattr(stream, "__len__")
    assert len(boring.RandomIterableDatasetWithLen(3, 7)) == 7
    assert len(list(boring.RandomIterableDatasetWithLen(3, 7))) == 7


def plain_loop(model: boring.BoringModel, epochs: int) -> None:
    """What BoringModel trains, written by hand."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
    data = model.train_dataloader()
    for _ in range(epochs):
        for batch in data:
            optimizer.zero_grad()
            nn.functional.mse_loss(model.layer(batch), torch.ones(1, 2)).backward()
            optimizer.step()
        schedule.step()


@pytest.mark.parametrize("kind", [boring.BoringModel, boring.ManualOptimBoringModel])
def test_a_fit_equals_the_plain_loop(kind: Any) -> None:
    torch.manual_seed(0)
    trained, by_hand = kind(), kind()
    by_hand.load_state_dict(trained.state_dict())
    torch.manual_seed(1)
    trainer = quiet(limit_val_batches=0)
    trainer.fit(trained)
    torch.manual_seed(1)
    plain_loop(by_hand, epochs=1)
    assert same_weights(trained, by_hand)
    assert trainer.global_step == 64
    expected = 0.01 if kind is boring.BoringModel else 0.1  # manual optimization leaves schedulers alone
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(expected)


def test_all_steps_are_there() -> None:
    outputs: dict[str, Any] = {}

    class Watched(boring.BoringModel):
        def on_validation_batch_end(self, out: Any, *_: Any) -> None:
            outputs["validation"] = sorted(out)

        def on_test_batch_end(self, out: Any, *_: Any) -> None:
            outputs["test"] = sorted(out)

    model = Watched()
    trainer = quiet(limit_val_batches=2, limit_test_batches=2, limit_predict_batches=3)
    trainer.validate(model, verbose=False)
    trainer.test(model, verbose=False)
    predictions = trainer.predict(model)
    assert outputs == {"validation": ["x"], "test": ["y"]}
    assert [tuple(prediction.shape) for prediction in predictions or []] == [(1, 2)] * 3
    assert model.loss(torch.zeros(2, 2), torch.full((2, 2), 3.0)).item() == 9.0
    for name in ("train", "val", "test", "predict"):
        loader = getattr(model, f"{name}_dataloader")()
        assert (len(loader), tuple(next(iter(loader)).shape)) == (64, (1, 32))


def test_boring_data_has_a_quarter_for_each_stage() -> None:
    data = boring.BoringDataModule()
    trainer = quiet(limit_train_batches=2, limit_val_batches=2, limit_test_batches=2)
    model = boring.BoringModel()
    trainer.fit(model, datamodule=data)
    trainer.test(model, datamodule=data, verbose=False)
    assert len(trainer.predict(model, datamodule=data) or []) == 64
    quarters = [data.random_train, data.random_val, data.random_test, data.random_predict]
    assert [list(quarter.indices) for quarter in quarters] == [list(range(64 * i, 64 * i + 64)) for i in range(4)]
    fresh = boring.BoringDataModule()
    fresh.setup("validate")
    there = {name for name in ("train", "val", "test", "predict") if hasattr(fresh, f"random_{name}")}
    assert there == {"val"}


def test_boring_data_without_length() -> None:
    data = boring.BoringDataModuleNoLen()
    for name, samples in (("train", 512), ("val", 128), ("test", 256), ("predict", 64)):
        data.setup(STAGES[name])
        loader = getattr(data, f"{name}_dataloader")()
        batches = list(loader)
        assert (len(batches), tuple(batches[0].shape)) == (samples, (1, 32))
        with pytest.raises(TypeError):
            len(loader)
    model = boring.BoringModel()
    trainer = quiet(max_steps=3, max_epochs=None, limit_val_batches=0)
    trainer.fit(model, datamodule=boring.BoringDataModuleNoLen())
    assert trainer.global_step == 3


def test_two_loaders_for_each_stage() -> None:
    data = boring.IterableBoringDataModule()
    for name, samples in (("train", 16), ("val", 32), ("test", 64), ("predict", 128)):
        data.setup(STAGES[name])
        both = getattr(data, f"{name}_dataloader")()
        assert [len(list(loader)) for loader in both] == [samples, samples]
        assert [tuple(next(iter(loader)).shape) for loader in both] == [(1, 4), (1, 4)]


def test_demo_model_trains() -> None:
    torch.manual_seed(0)
    model = boring.DemoModel(out_dim=3, learning_rate=0.05)
    batch = torch.randn(4, 32)
    assert tuple(model(batch).shape) == (4, 3)
    assert (model(batch) >= 0).all()
    before = model(batch).sum().item()
    trainer = quiet(max_epochs=5)
    trainer.fit(model, [batch])
    assert isinstance(trainer.optimizers[0], torch.optim.Adam)
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.05
    assert model(batch).sum().item() < before
    assert torch.equal(model.training_step(batch, 0), model(batch).sum())


def test_net_gives_log_probabilities() -> None:
    net = boring.Net().eval()
    output = net(torch.randn(2, 1, 28, 28))
    assert tuple(output.shape) == (2, 10)
    assert torch.allclose(output.exp().sum(1), torch.ones(2), atol=1e-5)
    assert sum(parameter.numel() for parameter in net.parameters()) == 1_199_882
    assert not torch.equal(net.train()(torch.ones(2, 1, 28, 28)), net(torch.ones(2, 1, 28, 28)))  # drops out

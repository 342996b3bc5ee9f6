"""What only a CUDA device can show of a whole run: exact resume, NCCL, memory that runs out, where things end up."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hasten as L
from hasten.checkpoint import background, files
from hasten.machine.watchdog import write_flight_record
from hasten.plugins import AsyncCheckpointIO, TorchCheckpointIO
from hasten.resolve import runtime as resolve_runtime
from hasten.strategies import FSDPStrategy
from tests.models import Classifier, loader, quiet, same_weights

pytestmark = pytest.mark.gpu


def on_gpu(**arguments: Any) -> L.Trainer:
    return quiet(**{"accelerator": "gpu", **arguments})


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true", "16-mixed"])
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path, precision: Any) -> None:
    path = str(tmp_path / "a.ckpt")

    def trained(seed: int = 0, ckpt: str | None = None, save: bool = False, **more: Any) -> nn.Module:
        torch.manual_seed(seed)
        module = Classifier(dropout=0.5)
        torch.manual_seed(seed)
        trainer = on_gpu(max_epochs=2, precision=precision, **more)
        trainer.fit(module, loader(shuffle=True), ckpt_path=ckpt)
        if save:
            trainer.save_checkpoint(path)
        return module

    whole = trained()
    trained(save=True, max_steps=13)
    assert same_weights(whole, trained(seed=1, ckpt=path))


def test_module_optimizer_and_predictions_end_up_on_the_cpu() -> None:
    trainer, module = on_gpu(), Classifier()
    trainer.fit(module, loader(), loader())
    assert {tensor.device.type for tensor in module.state_dict().values()} == {"cpu"}
    state = trainer.optimizers[0].state
    assert {value.device.type for kept in state.values() for value in kept.values()} == {"cpu"}
    module(torch.ones(1, 8))
    predicted = trainer.predict(module, loader())
    assert predicted is not None
    assert {one.device.type for one in predicted} == {"cpu"}
    # And where they were left, the next run goes on.
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader())


def test_one_process_speaks_nccl() -> None:
    seen = []

    class Asks(Classifier):
        def on_train_start(self) -> None:
            seen.append(torch.distributed.get_backend())

    on_gpu(devices=1, strategy="ddp").fit(Asks(), loader())
    assert seen == ["nccl"]


def test_nccls_record_of_collectives_is_written_beside_the_logs(tmp_path: Path) -> None:
    runtime = resolve_runtime(accelerator="cuda", devices=1, strategy="ddp")

    def work() -> None:
        torch.distributed.all_reduce(torch.ones(1, device="cuda"))
        torch.cuda.synchronize()
        write_flight_record(0, str(tmp_path / "logs"))

    runtime.launch(work)
    record = pickle.loads((tmp_path / "logs" / "nccl_trace_rank_0").read_bytes())
    assert any("all_reduce" in entry["profiling_name"] for entry in record["entries"])


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp_cpu_offload"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_one_process_with_sharded_parameters_trains_to_the_same_weights(
    tmp_path: Path, strategy: str, precision: Any
) -> None:
    def trained(strategy: str, ckpt: Any = None, **more: Any) -> Any:
        torch.manual_seed(0)
        module = Classifier()
        trainer = on_gpu(devices=1, strategy=strategy, precision=precision, gradient_clip_val=0.5, **more)
        trainer.fit(module, loader(), loader(), ckpt_path=ckpt)
        trainer.save_checkpoint(tmp_path / "a.ckpt")
        return torch.load(tmp_path / "a.ckpt", weights_only=True)["state_dict"]

    whole = trained("auto", max_epochs=2)
    tolerance = {"atol": 1e-5, "rtol": 1e-5} if precision == "32-true" else {"atol": 2e-2, "rtol": 2e-2}
    torch.testing.assert_close(trained(strategy, max_epochs=2), whole, **tolerance)
    trained(strategy, max_epochs=1)
    torch.testing.assert_close(trained(strategy, tmp_path / "a.ckpt", max_epochs=2), whole, **tolerance)


@pytest.mark.parametrize("plugin", [None, AsyncCheckpointIO])
def test_one_process_saves_its_shards_from_the_device_and_resumes(tmp_path: Path, plugin: Any) -> None:
    def trained(folder: str, epochs: int, ckpt: Any = None) -> Any:
        torch.manual_seed(0)
        trainer = on_gpu(
            devices=1,
            max_epochs=epochs,
            strategy=FSDPStrategy(state_dict_type="sharded"),
            plugins=None if plugin is None else plugin(),
            enable_checkpointing=True,
            callbacks=[L.callbacks.ModelCheckpoint(tmp_path / folder, save_last=True, every_n_train_steps=3)],
        )
        trainer.fit(Classifier(), loader(), loader(), ckpt_path=ckpt)
        return files.load(tmp_path / folder / "last.ckpt").whole()

    whole = trained("whole", 2)
    trained("parts", 1)
    resumed = trained("resumed", 2, tmp_path / "parts" / "last.ckpt")
    for name, value in whole["state_dict"].items():
        assert torch.equal(resumed["state_dict"][name], value)
    for index, entries in whole["optimizer_states"][0]["state"].items():
        for name, value in entries.items():
            assert torch.equal(resumed["optimizer_states"][0]["state"][index][name], value)


def test_a_checkpoint_written_in_the_background_is_the_one_written_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "LARGE_BYTES", 0)

    def saved(**arguments: Any) -> Any:
        L.seed_everything(1)
        callbacks = [L.callbacks.ModelCheckpoint(tmp_path / "saved", "{step}", every_n_train_steps=3)]
        on_gpu(enable_checkpointing=True, callbacks=callbacks, **arguments).fit(Classifier(), loader(), loader())
        (path,) = (tmp_path / "saved").iterdir()
        return path.name, torch.load(path.rename(tmp_path / path.name))

    (name, at_once), (same_name, later) = saved(plugins=TorchCheckpointIO()), saved()
    assert name == same_name
    for key, value in at_once["state_dict"].items():
        assert value.is_cuda
        assert later["state_dict"][key].device == value.device
        torch.testing.assert_close(later["state_dict"][key], value)


def test_where_memory_really_runs_out_batches_are_split() -> None:
    class Wide(Classifier):
        def loss(self, batch: Any) -> Tensor:
            wide = self.layers(batch[0])[:, :1] * torch.ones(2**24, device=batch[0].device)
            return super().loss(batch) + 0 * wide.square().mean()

    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(3e9 / torch.cuda.mem_get_info()[1])
    try:
        trainer = on_gpu(micro_batch="auto")
        trainer.fit(Wide(), loader(samples=64, batch_size=64))
        assert trainer.global_step == 1
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.parametrize("skipped", [[0], [0, 1], [3]])
def test_batches_without_a_loss_are_left_out_under_a_scaler(skipped: list[int]) -> None:
    class Skips(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx in skipped else self.loss(batch)

    on_gpu(precision="16-mixed", gradient_clip_val=1.0).fit(Skips(), loader())


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam, torch.optim.LBFGS])
def test_an_optimizer_that_has_stepped_goes_on_in_another_fit(make: Any) -> None:
    whole, halves = Classifier(), Classifier()
    halves.load_state_dict(whole.state_dict())
    for module, epochs in ((whole, [2]), (halves, [1, 1])):
        options = {"momentum": 0.9} if make is torch.optim.SGD else {}
        optimizer = make(module.parameters(), lr=0.01, **options)
        module.configure_optimizers = lambda optimizer=optimizer: optimizer  # type: ignore[method-assign]
        for count in epochs:
            on_gpu(max_epochs=count).fit(module, loader())
    assert same_weights(whole, halves)


def test_a_value_logged_from_the_cpu_first_and_from_the_device_then() -> None:
    class Logs(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("mixed", torch.tensor(1.0, device="cpu" if batch_idx < 2 else self.device), on_epoch=True)
            return self.loss(batch)

    trainer = on_gpu()
    trainer.fit(Logs(), loader())
    assert trainer.callback_metrics["mixed"] == 1.0

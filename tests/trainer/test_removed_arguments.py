"""Arguments of older versions and of other libraries: each message has a line to write, and that line works."""

from __future__ import annotations

import functools
import importlib.util
import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import hasten
import hasten as L
from hasten import callbacks as cb
from hasten._lib.errors import notes_of
from hasten.accelerators import HPUAccelerator
from hasten.cli import LightningCLI
from hasten.loggers import CSVLogger
from hasten.plugins import MixedPrecision
from hasten.profilers import AdvancedProfiler, SimpleProfiler
from hasten.tuner import Tuner
from tests.batching.sequences import Padded
from tests.models import Classifier, dataset, loader, quiet
from tests.refusals import refused

REMOVED: list[tuple[str, Any]] = [
    ("num_processes", 2), ("tpu_cores", 8), ("amp_backend", "native"), ("distributed_backend", "ddp"),
    ("nb_gpu_nodes", 1), ("auto_lr_find", True), ("auto_scale_batch_size", True), ("automatic_optimization", False),
    ("default_save_path", "here"), ("early_stop_callback", True), ("enable_pl_optimizer", True),
    ("flush_logs_every_n_steps", 10), ("gradient_clip", 0.5), ("log_gpu_memory", "all"), ("max_nb_epochs", 3),
    ("min_nb_epochs", 1), ("move_metrics_to_cpu", True), ("multiple_trainloader_mode", "max_size_cycle"),
    ("nb_sanity_val_steps", 1), ("overfit_pct", 0.5), ("prepare_data_per_node", False), ("print_nan_grads", True),
    ("process_position", 1), ("progress_bar_refresh_rate", 20), ("reload_dataloaders_every_epoch", True),
    ("replace_sampler_ddp", False), ("resume_from_checkpoint", "some.ckpt"), ("row_log_interval", 10),
    ("show_progress_bar", False), ("stochastic_weight_avg", True), ("terminate_on_nan", True),
    ("test_percent_check", 0.5), ("track_grad_norm", "inf"), ("train_percent_check", 0.5), ("val_percent_check", 0.5),
    ("weights_save_path", "weights"), ("weights_summary", "full"), ("fused", True), ("bf16", True), ("tf32", True),
    ("gradient_checkpointing", True), ("packing", True), ("group_by_length", True), ("torch_compile", True),
    ("loggers", False), ("using_native_amp", True), ("preload", True),
]  # fmt: skip

OF_FABRIC: list[tuple[str, Any]] = [
    ("num_processes", 2), ("fused", True), ("packed", True), ("dropout", "fast"), ("memory", "full"),
    ("batching", "length"), ("resident", True),
    ("num_workers", 2), ("gradient_clip_val", 0.5), ("accumulate_grad_batches", 4), ("logger", []),
    ("replace_sampler_ddp", False),
]  # fmt: skip


def refusal_of(make: Any, **arguments: Any) -> str:
    with pytest.raises((TypeError, ValueError)) as caught:
        make(**arguments)
    text = str(caught.value)
    assert len(text.splitlines()) <= 2
    return text


def line_in(text: str) -> str:
    """Return the line that a message says to write; nothing where it says to leave the argument out."""
    if "Leave it out." in text:
        return ""
    found = re.search(r"Write `?(.+?)`?(?:;.*|, or .*| before .*| around .*| in .*|\.)$", text)
    assert found is not None, text
    return found.group(1)


def trainer_on_cpu(**arguments: Any) -> L.Trainer:
    return L.Trainer(**{"accelerator": "cpu", **arguments})


class Searchable(Classifier):
    """A module that every line of the messages can be tried on."""

    def __init__(self) -> None:
        super().__init__()
        self.lr, self.batch_size = 0.1, 4

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        # Of several loaders: a batch of each.
        return super().training_step(batch[0] if isinstance(batch[0], list) else batch, batch_idx)

    def train_dataloader(self) -> Any:
        return DataLoader(dataset(8), self.batch_size)


def execute(text: str, **names: Any) -> Any:
    """Execute the line in a message."""
    line, space = line_in(text), {"Trainer": trainer_on_cpu, "Fabric": L.Fabric, "hasten": hasten, **names}
    if line.startswith("with "):
        exec(f"{line}\n    pass", space)
        return None
    if line.startswith("self."):
        exec(line, space)
        return None
    return eval(line or "Trainer()", space)


@pytest.mark.parametrize(("name", "value"), REMOVED, ids=str)
def test_the_line_for_an_argument_that_is_gone_works(
    name: str, value: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = refusal_of(L.Trainer, **{name: value})
    assert text.startswith(f"Trainer.__init__() got an unexpected keyword argument {name!r}")
    model = Searchable()
    if name == "resume_from_checkpoint":
        trained = quiet()
        trained.fit(Searchable())
        trained.save_checkpoint("some.ckpt")
    trainer = quiet(max_steps=40 if "lr_find" in name else 1, max_epochs=-1)
    if name == "track_grad_norm" and "grad_norm(self" in text:

        class Tracks(Searchable):
            def on_before_optimizer_step(self, optimizer: Any) -> None:
                execute(text, self=self)

        trainer.fit(Tracks())
        assert any("grad" in key for key in trainer.callback_metrics)
        return
    if name == "tpu_cores" and importlib.util.find_spec("torch_xla") is None:
        with pytest.raises(ModuleNotFoundError, match="needs torch_xla"):
            execute(text)
        return
    execute(text, trainer=trainer, model=model, loaders=[loader(), loader()], self=model)


@pytest.mark.parametrize(("name", "value"), OF_FABRIC, ids=str)
def test_the_line_for_an_argument_that_a_fabric_does_not_have_works(name: str, value: Any) -> None:
    text = refusal_of(L.Fabric, **{name: value})
    fabric = L.Fabric(accelerator="cpu")
    network: nn.Module = nn.Linear(8, 2)
    if name in ("packed", "dropout", "memory"):
        network = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, batch_first=True), 2)
    model, optimizer = fabric.setup(network, torch.optim.SGD(network.parameters(), lr=0.1))
    fabric.backward(model(torch.ones(2, 3, 8)).sum())
    names: dict[str, Any] = {"model": model, "optimizer": optimizer, "accumulating": True}
    # Samples of different lengths, which lengths have to do with.
    names["loader"] = DataLoader(Padded(), 4) if name == "batching" else loader()
    execute(text, fabric=fabric, **names)


@pytest.mark.parametrize(
    ("make", "unknown", "fix"),
    [
        (cb.ModelCheckpoint, "save_topk", "save_top_k"),
        (cb.ModelCheckpoint, "save_best_only", "save_top_k=1"),
        (cb.ModelCheckpoint, "period", "every_n_epochs=1"),
        (cb.EarlyStopping, "restore_best_weights", "ckpt_path='best'"),
        (cb.LearningRateMonitor, "logging_intervals", "logging_interval"),
        (CSVLogger, "save_dirs", "save_dir"),
        (LightningCLI, "model", "model_class"),
        (functools.partial(MixedPrecision, "bf16-mixed", "cpu"), "attention_in_32_bits", "(fast_attention=1)"),
        (lambda **given: quiet().fit(Classifier(), **given), "train_dataloader", "train_dataloaders"),
        (lambda **given: quiet().fit(Classifier(), **given), "epochs", "Trainer(max_epochs=1)"),
        (lambda **given: quiet().fit(Classifier(), **given), "test_dataloaders", "trainer.test(model, dataloaders)"),
        (lambda **given: quiet().test(Classifier(), **given), "test_dataloaders", "trainer.test(dataloaders=1)"),
        (lambda **given: L.Fabric().setup_dataloaders(**given), "dataloader", "setup_dataloaders(dataloader)"),
        (lambda **given: Tuner(quiet()).lr_find(Classifier(), **given), "lr_min", "min_lr"),
    ],
)
def test_unknown_arguments_of_other_calls_are_answered_by_the_nearest(make: Any, unknown: str, fix: str) -> None:
    with refused(TypeError, unknown, fix=fix):
        make(**{unknown: 1})


def test_a_call_on_the_class_says_to_make_an_object() -> None:
    with refused(TypeError, fix="Trainer(...).fit(...)"):
        L.Trainer.fit(Classifier(), loader())  # type: ignore[arg-type]
    L.Trainer.fit(self=quiet(), model=Classifier(), train_dataloaders=loader())


def test_an_accelerator_that_is_not_here_says_what_is() -> None:
    with refused(ValueError, says="HPUAccelerator") as caught:
        HPUAccelerator()
    execute(str(caught.value))


def test_the_message_for_gpus_has_both_ways_to_write_it() -> None:
    text = refusal_of(L.Trainer, gpus=2)
    assert "Trainer(accelerator='gpu', devices=2)" in text
    assert "Trainer(accelerator='cpu')" in text


def test_old_arguments_of_profilers_and_of_log_are_answered_by_the_new_ones() -> None:
    for profiler in (SimpleProfiler, AdvancedProfiler):
        with refused(TypeError, "output_filename", fix=f"{profiler.__name__}(filename='times')"):
            profiler(output_filename="times")  # type: ignore[call-arg]

    class Net(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("x", 1.0, sync_dist_op="sum")  # type: ignore[call-arg]

    with pytest.raises(TypeError) as caught:
        quiet().fit(Net(), loader())
    assert "self.log(reduce_fx=...)" in "".join(note.fix for note in notes_of(caught.value))


def test_a_subclass_whose_init_does_not_call_the_one_above_is_told_so() -> None:
    class MyTrainer(L.Trainer):
        def __init__(self) -> None:
            self.own = 1

    class MyFabric(L.Fabric):
        def __init__(self) -> None:
            self.own = 1

    uses: list[Any] = [lambda: MyTrainer().fit(Classifier(), loader()), lambda: MyFabric().launch()]
    for use in (*uses, lambda: MyFabric().device):
        with refused(AttributeError, fix=".__init__"):
            use()

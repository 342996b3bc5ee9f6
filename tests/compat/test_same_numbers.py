"""Where Lightning and hasten do something else on purpose, a program under Lightning's names has Lightning's numbers.

Loaders are read when and as far as Lightning reads them: programs that draw random numbers see the same ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import hasten as L
from hasten.elsewhere import conventions
from hasten.loggers import Logger
from hasten_lightning.conventions import LIGHTNING
from hasten_lightning.fabric import Fabric
from hasten_lightning.trainer import Trainer
from tests.fakes import RowLogger
from tests.models import quiet
from tests.refusals import refused, warned


@pytest.fixture(autouse=True)
def lightning_s_names() -> Iterator[None]:
    conventions.use(LIGHTNING)
    yield
    conventions.use(conventions.HASTEN)


class Draws(L.LightningModule):
    """Draws a number in each step and before the epochs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.drawn: list[float] = []

    def draw(self) -> None:
        self.drawn.append(torch.rand(()).item())

    def on_train_start(self) -> None:
        self.draw()

    def on_validation_start(self) -> None:
        self.draw()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.draw()
        return self.layer(batch).sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.draw()

    def train_dataloader(self) -> Any:
        return DataLoader(torch.ones(2, 1), 2)  # type: ignore[arg-type,var-annotated]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def begin() -> None:
    """Draw what a loader draws when it is iterated over."""
    torch.empty((), dtype=torch.int64).random_()


def test_random_numbers_come_in_lightning_s_order() -> None:
    module = Draws()
    torch.manual_seed(0)
    trainer = quiet(max_epochs=2, reload_dataloaders_every_n_epochs=1, num_sanity_val_steps=0)
    trainer.fit(module, val_dataloaders=DataLoader(torch.ones(1, 1)))  # type: ignore[arg-type,var-annotated]
    torch.manual_seed(0)
    expected: list[float] = []

    def rand(number: int) -> None:
        expected.extend(torch.rand(()).item() for _ in range(number))

    begin()
    rand(2)  # on_train_start, training_step
    begin()
    rand(2)  # on_validation_start, validation_step
    begin()
    begin()  # New loaders are begun twice.
    rand(1)
    begin()
    rand(2)
    assert module.drawn == expected


def test_no_more_batches_are_read_than_the_length_says() -> None:
    class Endless:
        read = 0

        def __len__(self) -> int:
            return 3

        def __iter__(self) -> Iterator[torch.Tensor]:
            while True:
                self.read += 1
                yield torch.ones(1, 1)

    train, validation = Endless(), Endless()
    module = Draws()
    trainer = quiet(max_epochs=2, num_sanity_val_steps=0)
    trainer.fit(module, train, validation)
    assert (trainer.global_step, train.read, validation.read) == (6, 6, 6)
    together = {"first": Endless(), "second": DataLoader(torch.ones(1, 1))}  # type: ignore[arg-type,var-annotated]
    trainer = quiet(max_epochs=1, limit_val_batches=0)

    class Joined(Draws):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.layer(batch["first"] + batch["second"]).sum()

    trainer.fit(Joined(), together)
    assert (trainer.global_step, together["first"].read) == (3, 3)  # type: ignore[attr-defined]


def test_a_generator_of_the_loader_does_not_move_at_its_end() -> None:
    generator = torch.Generator()
    data = torch.arange(4.0)[:, None]

    class Sees(Draws):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.drawn += batch.flatten().tolist()
            return self.layer(batch).sum()

    module = Sees()
    loader = DataLoader(data, 2, shuffle=True, generator=generator.manual_seed(0))  # type: ignore[arg-type,var-annotated]
    quiet(max_epochs=2, limit_val_batches=0).fit(module, loader)
    drawn, orders = module.drawn[1:], []
    generator.manual_seed(0)
    for _ in range(2):
        torch.empty((), dtype=torch.int64).random_(generator=generator)
        orders += torch.randperm(4, generator=generator).tolist()
    assert drawn == orders


def test_the_last_accumulation_is_divided_by_its_full_size() -> None:
    module = Draws()
    torch.nn.init.zeros_(module.layer.weight)
    data = DataLoader(torch.ones(3, 1))  # type: ignore[arg-type,var-annotated]
    quiet(max_epochs=1, limit_val_batches=0, accumulate_grad_batches=2).fit(module, data)
    # Each gradient is 1. The first step is by (1 + 1) / 2, the second by 1 / 2, with a learning rate of 0.1.
    assert module.layer.weight.item() == pytest.approx(-0.15)


def test_16_bit_weights_are_updated_in_16_bits(recwarn: pytest.WarningsRecorder) -> None:
    class Clipped(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.layer(batch).pow(2).mean()

        # Lightning gives the two numbers by name, always.
        def configure_gradient_clipping(  # type: ignore[override]
            self, optimizer: Any, gradient_clip_val: Any, gradient_clip_algorithm: Any
        ) -> None:
            assert (gradient_clip_val, gradient_clip_algorithm) == (None, None)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    batches = [torch.randn(4, 4, generator=torch.Generator().manual_seed(n)) for n in range(3)]
    module, plain = Clipped(), Clipped().to(torch.bfloat16).layer
    quiet(max_epochs=1, precision="bf16-true").fit(module, batches)
    optimizer = torch.optim.SGD(plain.parameters(), lr=1e-3)
    for batch in batches:
        optimizer.zero_grad()
        plain(batch.to(torch.bfloat16)).pow(2).mean().backward()
        optimizer.step()
    assert torch.equal(module.layer.weight, plain.weight)
    assert not [each for each in recwarn if "cannot be called" in str(each.message)]


@pytest.mark.world_size(2)
def test_processes_train_on_shuffled_samples() -> None:
    class Seen(Draws):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[float] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.seen += batch.flatten().tolist()
            return self.layer(batch).sum()

        def train_dataloader(self) -> Any:
            return DataLoader(torch.arange(8.0).view(8, 1), 2)  # type: ignore[arg-type,var-annotated]

    conventions.use(LIGHTNING)  # Fixtures run in the first process only.
    module = Seen()
    trainer = quiet(devices=2, strategy="ddp", max_epochs=1)
    try:
        trainer.fit(module)
    finally:
        conventions.use(conventions.HASTEN)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(0)).tolist()
    assert module.seen == order[trainer.global_rank :: 2]


class Calls(Logger):
    """Notes what it is asked to do, on every process."""

    name, version = "calls", 0

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.calls.append(step)

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self.calls.append("hyper-parameters")

    def finalize(self, status: str) -> None:
        self.calls.append(status)


@pytest.mark.world_size(2)
def test_a_logger_of_the_program_is_called_on_every_process() -> None:
    class Logs(Draws):
        def __init__(self, width: int = 1) -> None:
            super().__init__()
            self.save_hyperparameters()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.layer(batch).sum()
            self.log("loss", loss)
            return loss

        def train_dataloader(self) -> Any:
            return DataLoader(torch.arange(8.0).view(8, 1), 2)  # type: ignore[arg-type,var-annotated]

    logger = Calls()
    conventions.use(LIGHTNING)
    try:
        Trainer(
            devices=2, strategy="ddp", accelerator="cpu", max_epochs=1, logger=logger, log_every_n_steps=1,
            enable_progress_bar=False, enable_checkpointing=False, enable_model_summary=False,
        ).fit(Logs())  # fmt: skip
    finally:
        conventions.use(conventions.HASTEN)
    assert logger.calls == ["hyper-parameters", 0, 1, "success"]


@pytest.mark.parametrize(
    ("precision", "default"), [("32-true", torch.float32), ("32-true", torch.float64), ("64-true", torch.float32)]
)
def test_means_of_64_bit_values_keep_their_digits(precision: Any, default: torch.dtype) -> None:
    class Logs(Draws):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("third", torch.tensor(1 / 3, dtype=torch.float64), on_step=False, on_epoch=True)
            self.log("number", 1 / 3, on_step=False, on_epoch=True)
            self.log("single", torch.tensor(1 / 3, dtype=torch.float32), on_step=False, on_epoch=True)
            return self.layer(batch).sum()

    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        trainer = quiet(max_epochs=1, precision=precision)
        trainer.fit(Logs(), DataLoader(torch.arange(6.0).view(6, 1), 2))  # type: ignore[arg-type]
    finally:
        torch.set_default_dtype(before)
    found = trainer.callback_metrics
    single = torch.tensor(1 / 3, dtype=torch.float32).double().item()
    assert found["third"].dtype == torch.float64
    assert found["third"].item() == 1 / 3
    assert found["number"].item() == (single if (precision, default) == ("32-true", torch.float32) else 1 / 3)
    assert found["single"].item() == single


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_fabric_gives_forward_the_inputs_of_mixed_precision(dtype: torch.dtype) -> None:
    class Sees(torch.nn.Linear):
        def forward(self, x: Tensor, more: Tensor | None = None) -> Tensor:
            self.seen = x.dtype, None if more is None else more.dtype
            return super().forward(x)

    def seen(fabric: Any) -> Any:
        model = Sees(2, 1)
        assert (
            fabric.setup(model)(torch.ones(1, 2, dtype=dtype), more=torch.ones(1, dtype=dtype)).dtype == torch.float32
        )
        return model.seen

    assert seen(Fabric(accelerator="cpu", precision="bf16-mixed")) == (torch.bfloat16,) * 2
    # hasten leaves digits to what autocast does not compute in 16 bits, such as positions.
    assert seen(L.Fabric(accelerator="cpu", precision="bf16-mixed")) == (torch.float32,) * 2


# -- several loaders, several fits, manual optimization


class Orders(Draws):
    """Keeps the samples of each step, and draws nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def draw(self) -> None: ...

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        parts = batch.values() if isinstance(batch, dict) else [batch]
        self.seen.append([part.flatten().tolist() for part in parts])
        return sum(self.layer(part).sum() for part in parts)


def numbers(count: int) -> DataLoader[Any]:
    return DataLoader(torch.arange(float(count))[:, None], 4, shuffle=True)  # type: ignore[arg-type]


def begun(*loaders: Any) -> list[Any]:
    """Return the batches of loaders that all begin, in this order, before the first is read."""
    begins = [iter(loader) for loader in loaders]
    return [[batch.flatten().tolist() for batch in batches] for batches in zip(*begins, strict=True)]


def test_several_loaders_begin_before_the_first_of_them_draws_an_order_in_each_epoch() -> None:
    model, first, second = Orders(), numbers(8), numbers(8)
    L.seed_everything(0, verbose=False)
    quiet(max_epochs=3).fit(model, {"a": first, "b": second})
    L.seed_everything(0, verbose=False)
    # Of the first epoch, then of the others.
    assert model.seen == [step for _ in range(3) for step in begun(first, second)]


def test_a_second_fit_begins_the_loader_twice() -> None:
    model, loader = Orders(), numbers(4)
    trainer = quiet(max_epochs=1)
    L.seed_everything(0, verbose=False)
    trainer.fit(model, loader)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, loader)
    L.seed_everything(0, verbose=False)
    expected = begun(loader)
    iter(loader)
    assert model.seen == expected + begun(loader)


class Shuffled:
    """A loader of its own kind, which draws its order when it is iterated over."""

    def __iter__(self) -> Iterator[Any]:
        return iter(torch.randperm(4).float().view(4, 1, 1))

    def __len__(self) -> int:
        return 4


def test_a_loader_of_the_program_s_own_is_iterated_over_once_before_the_first_epoch() -> None:
    model, loader = Orders(), Shuffled()
    trainer = quiet(max_epochs=2)
    L.seed_everything(0, verbose=False)
    trainer.fit(model, loader, Shuffled())
    L.seed_everything(0, verbose=False)
    expected = []
    iter(loader)
    for _ in range(2):
        expected += begun(loader)
        iter(Shuffled())  # For the validation; the sanity check changes no random numbers.
    assert model.seen == expected


def test_the_estimate_of_steps_begins_the_loader() -> None:
    class Estimates(Draws):
        def configure_optimizers(self) -> Any:
            assert self.trainer.estimated_stepping_batches == 1
            return super().configure_optimizers()

        def on_fit_start(self) -> None:
            self.draw()

    model = Estimates()
    L.seed_everything(0, verbose=False)
    quiet(max_epochs=1).fit(model)
    L.seed_everything(0, verbose=False)
    iter(model.train_dataloader())
    assert model.drawn[0] == torch.rand(()).item()


def test_what_is_drawn_for_the_sanity_check_does_not_count() -> None:
    class Checks(Draws):
        def on_sanity_check_start(self) -> None:
            torch.rand(3)

        def val_dataloader(self) -> Any:
            return self.train_dataloader()

    with_check, without = Checks(), Checks()
    for model, steps in ((with_check, 1), (without, 0)):
        L.seed_everything(0, verbose=False)
        quiet(max_epochs=1, num_sanity_val_steps=steps).fit(model)
    assert with_check.drawn[-3:] == without.drawn[-3:]


class Accumulates(Draws):
    """Steps on every second batch, so an epoch of three ends within an accumulation."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.gradients: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.layer(batch).sum())
        self.gradients.append(self.layer.bias.grad.item())  # type: ignore[union-attr]
        if batch_idx % 2:
            optimizer: Any = self.optimizers()
            optimizer.step()
            optimizer.zero_grad()

    def train_dataloader(self) -> Any:
        return DataLoader(torch.ones(3, 1), 1)  # type: ignore[arg-type,var-annotated]

    def val_dataloader(self) -> Any:
        return self.train_dataloader()


@pytest.mark.parametrize("decisions", [LIGHTNING, conventions.HASTEN])
def test_gradients_of_manual_optimization_over_a_validation(decisions: Any) -> None:
    conventions.use(decisions)
    model = Accumulates()
    quiet(max_epochs=2).fit(model)
    assert model.gradients == [1, 2, 1, *([1, 2, 1] if decisions is LIGHTNING else [2, 3, 1])]


def test_a_value_of_an_epoch_hook_comes_back_as_it_was_logged() -> None:
    value = torch.tensor(0.4406060576438904)

    class Logs(Draws):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("step", 1.0)

        def on_validation_epoch_end(self) -> None:
            self.log("f1", value)

        def val_dataloader(self) -> Any:
            return DataLoader(torch.ones(3, 1), 3)  # type: ignore[arg-type,var-annotated]

    trainer = quiet(max_epochs=1)
    trainer.fit(Logs())
    assert trainer.callback_metrics["f1"].item() == value.item()


def test_products_of_a_mean_are_rounded_before_they_are_added() -> None:
    values = torch.rand(40, generator=torch.Generator().manual_seed(0))

    class Logs(Draws):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("mean", values[batch_idx], on_epoch=True, on_step=False)
            return self.layer(batch).sum()

        def train_dataloader(self) -> Any:
            return DataLoader(torch.ones(120, 1), 3)  # type: ignore[arg-type,var-annotated]

    trainer = quiet(max_epochs=1)
    trainer.fit(Logs())
    total = torch.tensor(0.0)
    for value in values:
        total = total + value * 3
    assert trainer.callback_metrics["mean"].item() == (total / 120).item()


def test_an_unknown_key_of_configure_optimizers_is_a_warning() -> None:
    class Misspells(Draws):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            return {"optimizer": optimizer, "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}

    with warned(RuntimeWarning, says="'scheduler'"):
        quiet(max_epochs=1).fit(Misspells())
    conventions.use(conventions.HASTEN)
    with refused(ValueError, fix="lr_scheduler"):
        quiet(max_epochs=1).fit(Misspells())


def test_an_evaluation_in_the_last_hook_of_an_epoch_keeps_the_values_of_the_epoch() -> None:
    class Evaluates(Draws):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("loss", 2.0, on_epoch=True)
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val", 1.0)

        def val_dataloader(self) -> Any:
            return self.train_dataloader()

        def on_train_epoch_end(self) -> None:
            self.trainer.fit_loop.epoch_loop.val_loop.run()

    rows = RowLogger()
    quiet(max_epochs=2, logger=rows, check_val_every_n_epoch=5, num_sanity_val_steps=0).fit(Evaluates())
    written = [name for _, row in rows.rows for name in row]
    assert (written.count("loss_epoch"), written.count("val")) == (2, 2)


@pytest.mark.parametrize("way", ["argument", "loop", "source"])
def test_validation_loaders_are_asked_for_again_during_a_fit(way: str) -> None:
    seen: list[float] = []

    class Validates(Draws):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            seen.append(batch.item())

        def val_dataloader(self) -> Any:
            return DataLoader(torch.full((1, 1), float(self.current_epoch)), 1)  # type: ignore[arg-type,var-annotated]

        def on_train_epoch_end(self) -> None:
            loop: Any = self.trainer.fit_loop.epoch_loop.val_loop
            if way == "argument":
                self.trainer.reload_dataloaders_every_n_epochs = 1
            else:
                loop._combined_loader = None
            if way == "source":
                loop._data_source.instance = DataLoader(torch.full((1, 1), 9.0), 1)  # type: ignore[arg-type,var-annotated]

    quiet(max_epochs=3, num_sanity_val_steps=0).fit(Validates())
    assert seen == ([0, 9, 9] if way == "source" else [0, 1, 2])


# -- resumed runs that drew between the beginning of a loader and its first batch


class Interrupted(Orders):
    def __init__(self, at: int, path: Any) -> None:
        super().__init__()
        self.at, self.path = at, path

    def on_train_start(self) -> None:
        torch.rand(1)

    def on_train_batch_end(self, *_: Any) -> None:
        if len(self.seen) == self.at:
            self.trainer.save_checkpoint(self.path)
            raise ZeroDivisionError


@pytest.mark.parametrize("several", [False, True])
def test_a_run_resumed_after_any_batch_reads_the_rest_of_its_epoch(several: bool, tmp_path: Any) -> None:
    def data() -> Any:
        return {"a": numbers(12), "b": numbers(12)} if several else numbers(12)

    def seen(at: int, path: Any = None) -> list[Any]:
        model = Interrupted(at, tmp_path / "a.ckpt")
        L.seed_everything(0, verbose=False)
        with suppress(ZeroDivisionError):
            quiet(max_epochs=3).fit(model, data(), ckpt_path=path)
        return model.seen

    whole = seen(0)
    for at in (1, 2, 3, 4, 7):
        assert seen(at) + seen(0, tmp_path / "a.ckpt") == whole, at

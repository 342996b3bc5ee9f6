"""``hasten plan``: equal to a run on two processes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import hasten as L
from hasten.machine.host import bytes_text
from hasten_tools.plan import Ledger, PlanError, plan_fit, simulated
from hasten_tools.plan.report import parse_size
from tests.plan import on_two_processes
from tests.plan.on_two_processes import Transformer, loader, trainer
from tests.programs import fork_python
from tests.refusals import refused

pytestmark = pytest.mark.skipif(not hasattr(__import__("os"), "fork"), reason="a plan copies this process")


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What two processes held and sent in a step, by strategy."""
    folder = tmp_path_factory.mktemp("plan")
    ended = fork_python(on_two_processes.__file__, folder)
    assert ended.returncode == 0, ended.stderr[-3000:]
    found: dict[str, Any] = json.loads((folder / "0.json").read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize("name", ["ddp", "ddp_sharded", "fsdp2", "tensor parallel"])
def test_a_plan_equals_a_run_of_two_processes(name: str, real: dict[str, Any]) -> None:
    strategy = on_two_processes.strategies()[name]
    # On the CPU, where the run took place: on GPUs an optimizer steps all parameters together.
    plan = plan_fit(trainer(devices=1), Transformer(), loader(), devices=2, strategy=strategy, accelerator="cpu")
    planned, found = plan.measured, real[name]
    assert {name: list(shape) for name, shape in planned.shards.items()} == found["shards"]
    assert {name: list(sent) for name, sent in planned.sent.items()} == found["sent"]
    assert planned.peak == pytest.approx(found["peak"], rel=0.005)


def test_a_plan_leaves_the_process_as_it_was() -> None:
    model, one = Transformer(), trainer(devices=1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    plan_fit(one, model, loader(), devices=64, strategy="fsdp2")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not torch.distributed.is_initialized()
    assert one.world_size == 1


def test_shards_of_many_devices() -> None:
    found = plan_fit(trainer(devices=1), Transformer(), loader(), devices=64, strategy="fsdp2").measured
    # The first dimension of each parameter in 64 parts, rounded up.
    model = Transformer()
    assert found.shards == {
        name: (-(-value.shape[0] // 64), *value.shape[1:]) for name, value in model.named_parameters()
    }
    assert found.parameters == sum(value.numel() for value in model.parameters())
    assert found.weights == 4 * found.local_elements
    # AdamW has two numbers an element, and one count a parameter.
    assert found.optimizer == 2 * found.weights + 4 * len(found.shards)


class _Layers(L.LightningModule):
    """Layers whose weights are much larger than their activations."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def _rows() -> DataLoader[Tensor]:
    return DataLoader(torch.randn(512, 512), batch_size=128)  # type: ignore[arg-type]


class _Held:
    """A batch of a class of the program."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def to(self, *args: Any, **kwargs: Any) -> _Held:
        return _Held(self.x.to(*args, **kwargs))


def test_tensors_in_a_batch_of_another_class_count() -> None:
    class HeldLayers(_Layers):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch.x, batch_idx)

    data = [torch.randn(4, 512)]
    found = [
        plan_fit(trainer(devices=1), made, batches, devices=2, strategy="ddp").measured
        for made, batches in ((_Layers(), data), (HeldLayers(), list(map(_Held, data))))
    ]
    assert found[0].peak == found[1].peak


def test_a_batch_that_cannot_be_copied_is_left_as_it_is() -> None:
    class NoCopy:
        def __deepcopy__(self, memo: Any) -> Any:
            raise RuntimeError("no copies")

    batch = NoCopy()
    assert simulated.batch_without_data([batch], simulated.fake_mode())[0] is batch


def test_accumulation_sends_gradients_once() -> None:
    one = plan_fit(trainer(devices=1), _Layers(), _rows(), devices=8, strategy="ddp").measured
    three = trainer(devices=1, accumulate_grad_batches=3)
    several = plan_fit(three, _Layers(), _rows(), devices=8, strategy="ddp").measured
    assert one.sent["all-reduce"] == several.sent["all-reduce"]


def test_changes_that_make_it_fit() -> None:
    whole = plan_fit(trainer(devices=1), _Layers(), _rows(), devices=8, strategy="ddp").measured
    memory = int(whole.peak * 0.95 / 0.9)
    plan = plan_fit(trainer(devices=1), _Layers(), _rows(), devices=8, strategy="ddp", memory_bytes=memory)
    assert plan.fits is False
    found = {change.line: change for change in plan.changes}
    smaller = found["strategy='fsdp2'"].measured
    assert smaller is not None
    assert smaller.fits(memory)
    half = found["half the batch, twice the accumulation"].measured
    assert half is not None
    assert half.peak <= whole.peak
    assert half.sent == whole.sent
    assert "has no repeated blocks" in found["Trainer(memory='full')"].reason
    text = plan.table()
    assert "does not fit into 90%" in text
    assert "One change that makes it fit:\n  strategy='fsdp2'" in text
    assert "memory='full'" not in text


class _Reads(Transformer):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if loss.item() > 100:
            raise RuntimeError
        return loss


class _Selects(Transformer):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        embedded = self.embedding(batch)
        return embedded[embedded > 0].sum()


@pytest.mark.parametrize(
    ("model", "said"),
    [(_Reads, "(if loss.item() > 100:) reads the value of a tensor"), (_Selects, "computes a shape from values")],
)
def test_a_step_that_needs_values_is_refused_with_its_line(model: Any, said: str) -> None:
    with refused(PlanError, says="test_plan.py") as caught:
        plan_fit(trainer(devices=1), model(), loader(), devices=8, strategy="ddp")
    assert said in str(caught.value)


class _Manual(L.LightningModule):
    """Two optimizers, stepped by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        for optimizer, layer in zip(self.optimizers(), (self.first, self.second), strict=True):  # type: ignore[arg-type]
            optimizer.zero_grad()
            self.manual_backward(layer(batch).square().mean())
            optimizer.step()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9) for layer in (self.first, self.second)]


def test_manual_optimization_with_two_optimizers() -> None:
    data = DataLoader(torch.randn(16, 8), batch_size=4)  # type: ignore[arg-type]
    off = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    one = L.Trainer(accelerator="cpu", max_steps=2, enable_model_summary=False, **off)  # type: ignore[arg-type]
    found = plan_fit(one, _Manual(), data, devices=4, strategy="fsdp2").measured
    assert found.optimizer == found.weights
    assert found.sent["reduce-scatter"][0] == 2
    # It asks on every process which parameters a backward has used.
    found = plan_fit(one, _Manual(), data, devices=4, strategy="ddp").measured
    assert found.optimizer == found.weights
    assert found.sent["all-reduce"][0] >= 2


class _Measures(Transformer):
    def __init__(self) -> None:
        super().__init__()
        self.mean = pytest.importorskip("torchmetrics").MeanMetric()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        # It looks for values that are not numbers.
        self.mean(loss)
        self.log("mean", self.mean)
        return loss


def test_metrics_are_left_out() -> None:
    found = plan_fit(trainer(devices=1), _Measures(), loader(), devices=4, strategy="ddp").measured
    assert found.parameters == sum(parameter.numel() for parameter in Transformer().parameters())


def test_the_command(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\n"
        "from tests.plan.on_two_processes import *\n"
        "assert sys.argv[1:] == ['--size', '1']\n"
        "from hasten.callbacks import EarlyStopping, ModelCheckpoint, TQDMProgressBar\n"
        "from hasten.loggers import CSVLogger\n"
        "import hasten as L\n"
        "best, logger = ModelCheckpoint(save_last=True), CSVLogger('logs')\n"
        "given = dict(callbacks=[best, EarlyStopping('loss'), TQDMProgressBar()], logger=logger)\n"
        "given |= dict(devices=8, strategy='ddp', precision='16-mixed', compile=True)\n"
        "L.Trainer(max_steps=2, **given).fit(Transformer(), loader())\n"
        "raise SystemExit('the program went on ' + best.best_model_path)\n",
        encoding="utf-8",
    )
    file = tmp_path / "plan.json"
    options = ("--devices", "16", "--memory", "80GB", "--json", file)
    ended = fork_python("-m", "hasten", "plan", *options, program, "--size", "1", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert sorted(one.name for one in tmp_path.iterdir()) == ["plan.json", "program.py"]
    assert "Transformer on 16 devices of 2 machines\nstrategy 'ddp', precision 'bf16-mixed'" in ended.stdout
    assert "precision='16-mixed' is planned as 'bf16-mixed'" in ended.stdout
    assert "compile=True is left out" in ended.stdout
    assert "fits into 90% of 80 GB" in ended.stdout
    found = json.loads(file.read_text(encoding="utf-8"))
    assert found["fits"] is True
    assert found["measured"]["sent"]["all-reduce"][1] == 4 * found["measured"]["parameters"]


def test_the_command_plans_for_the_devices_of_the_program(tmp_path: Path) -> None:
    cases = [
        ("hasten", "devices='0,1', num_nodes=3", [], "6 devices of 3 machines"),
        # Where the length of the data is asked for, Lightning's behavior begins to read it.
        ("lightning", "num_nodes=2", [], "16 devices of 2 machines"),
        ("hasten", "devices=4", ["--nodes", "2"], "8 devices of 2 machines"),
    ]
    words = []
    for number, (package, given, options, _) in enumerate(cases):
        program = tmp_path / f"program_{number}.py"
        program.write_text(
            "from tests.plan.on_two_processes import *\n"
            f"import {package} as L\n"
            "class Scheduled(Transformer):\n"
            "    def configure_optimizers(self):\n"
            "        assert self.trainer.estimated_stepping_batches in (1, 2)\n"
            "        return super().configure_optimizers()\n"
            f"L.Trainer(max_epochs=1, max_steps=2, strategy='ddp', {given}).fit(Scheduled(), loader())\n",
            encoding="utf-8",
        )
        words.append([*options, str(program)])
    # Each command in a process of its own, which is forked from one that has imported torch.
    commands = (
        "import os, sys, torch._dynamo\n"
        "from hasten_tools.commands.plan import main\n"
        f"for words in {words!r}:\n"
        "    child = os.fork()\n"
        "    if not child:\n"
        "        code = main(words)\n"
        "        sys.stdout.flush()\n"
        "        os._exit(code)\n"
        "    os.waitpid(child, 0)\n"
    )
    ended = fork_python("-c", commands, cwd=tmp_path)
    for *_, planned in cases:
        assert f"Scheduled on {planned}\n" in ended.stdout, ended.stderr


def test_sizes() -> None:
    assert [parse_size(text) for text in ("80GB", "40 GiB", "1.5tb")] == [80 * 10**9, 40 * 2**30, 1_500 * 10**9]
    assert [bytes_text(count) for count in (0, 999, 999_600, 2_340_000_000)] == ["0 B", "999 B", "1 MB", "2.34 GB"]
    for wrong in ("80", "GB", "-1GB", "many"):
        with refused(ValueError, fix="size"):
            parse_size(wrong)


def test_the_ledger_follows_real_tensors() -> None:
    with Ledger() as ledger:
        kept = torch.zeros(100)
        view = kept[:50]
        other = torch.zeros(1000)
        del other
    assert (ledger.live, ledger.peak.total) == (400, 4400)
    assert view.numel() == 50

"""Several processes, started in every way there is; and what happens when one of them is lost."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from tests.models import Classifier, loader, quiet
from tests.programs import Forked, call_in_file, copying_python, started_copies
from tests.refusals import refused, warned
from torch import nn

import hasten as L
from hasten.callbacks import EarlyStopping, ModelCheckpoint
from hasten.machine.cluster import find_free_port
from hasten.resolve import runtime
from hasten.seed import isolate_rng, seed_everything
from hasten.strategies import DDPStrategy

PROGRAM = Path(__file__).with_name("programs.py")
SECONDS = 600  # Far more than any of it takes, on a loaded machine too.


def start(strategy: str, mode: str, folder: Path) -> Forked:
    return Forked((PROGRAM, strategy, mode, "."), cwd=folder, **started_copies(1))


def run(strategy: str, mode: str, folder: Path) -> tuple[int, str]:
    process = start(strategy, mode, folder)
    try:
        output, _ = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
    return process.returncode, output


def assert_all_gone(folder: Path) -> None:
    ids = [int(file.read_text()) for file in folder.glob("pid-*")]
    assert len(ids) == 2
    deadline = time.monotonic() + SECONDS
    while any(alive(process_id) for process_id in ids):
        assert time.monotonic() < deadline, "a process was left behind"
        time.sleep(0.05)


def alive(process_id: int) -> bool:
    try:
        state = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def wait_for(*files: Path) -> None:
    deadline = time.monotonic() + SECONDS
    while not all(file.exists() for file in files):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("rank1 dies", "the process of rank 1 was killed by SIGKILL"),
        ("rank1 exits, others sleep", "the process of rank 1 ended with exit code 3"),
        ("rank1 exits with 0", "the process of rank 1 ended in the middle of the run (exit code 0, without an error)"),
        ("rank0 raises", 'KeyError: "a mistake of the user\'s"'),
        ("rank0 leaves", "the process of rank 1 was still in a run or a barrier"),
    ],
)
def test_a_lost_process_ends_the_run_and_is_named(mode: str, said: str, tmp_path: Path) -> None:
    code, output = run("ddp", mode, tmp_path)
    assert code == 1
    assert said in output
    assert_all_gone(tmp_path)


def test_a_process_that_ends_before_the_run_is_named_at_once(tmp_path: Path) -> None:
    code, output = run("ddp", "rank1 ends before", tmp_path)
    assert code == 1
    assert "RuntimeError: rank 1 ended without an error, and rank 0 waits for all processes. All processes" in output


@pytest.mark.parametrize("strategy", ["ddp", "ddp_fork"])
def test_no_process_outlives_the_one_that_started_it(strategy: str, tmp_path: Path) -> None:
    process = start(strategy, "endless", tmp_path)
    wait_for(tmp_path / "started-0", tmp_path / "started-1")
    process.kill()
    process.communicate(timeout=SECONDS)
    assert_all_gone(tmp_path)


@pytest.mark.parametrize(("strategy", "number"), [("ddp", signal.SIGTERM), ("ddp_fork", signal.SIGINT)])
def test_a_signal_to_the_first_process_stops_all_at_the_same_step(
    strategy: str, number: signal.Signals, tmp_path: Path
) -> None:
    process = start(strategy, "endless", tmp_path)
    wait_for(tmp_path / "started-0", tmp_path / "started-1")
    process.send_signal(number)
    output, _ = process.communicate(timeout=SECONDS)
    # Python ends by the signal itself when a KeyboardInterrupt reaches its top.
    assert process.returncode in (128 + number, -number), output
    stops = [(tmp_path / f"stopped-{rank}").read_text() for rank in (0, 1)]
    assert stops[0] == stops[1]
    assert stops[0].split()[0] == str(int(number))
    assert_all_gone(tmp_path)


# -- copies started from here


def copies(mode: str, folder: Path) -> None:
    strategy = DDPStrategy(start_method="forkserver")
    run = runtime(accelerator="cpu", devices=2, strategy=strategy)
    run.launch(call_in_file, str(PROGRAM), "train_here", mode, str(folder))


@pytest.mark.parametrize(
    ("mode", "kind", "fact"),
    [
        ("rank1 dies", RuntimeError, "SIGKILL"),
        ("rank1 exits, others sleep", RuntimeError, "3"),
        ("rank1 raises", KeyError, "user's"),
        ("rank1 is interrupted", KeyboardInterrupt, "1"),
        ("rank1 ends its steps", RuntimeError, "the process of rank 1 has ended its program"),
    ],
)
def test_a_lost_copy_raises_here_and_is_named(mode: str, kind: type[Exception], fact: str, tmp_path: Path) -> None:
    with refused(kind, says=fact) as caught:
        copies(mode, tmp_path)
    if kind is KeyError:
        assert caught.value.__notes__ == [f"This was raised in the process of rank {mode[4]}."]
        assert "misbehave" in str(caught.value.__cause__)
    assert_all_gone(tmp_path)


def give_back(value: int, *, factor: int = 1) -> int:
    return value * factor * torch.distributed.get_world_size()


def raise_of_a_class_that_cannot_be_sent() -> None:
    class Local(Exception):
        pass

    raise Local("from far away")


def test_copies_return_the_first_processs_result_or_error() -> None:
    run = runtime(accelerator="cpu", devices=2, strategy="ddp_fork")
    assert run.launch(give_back, 21, factor=1) == 42
    assert "LOCAL_RANK" not in os.environ
    assert not torch.distributed.is_initialized()
    with pytest.raises(RuntimeError, match="Local: from far away"):
        run.launch(raise_of_a_class_that_cannot_be_sent)
    spawned = runtime(accelerator="cpu", devices=2, strategy="ddp_spawn")
    with refused(TypeError, "start_method"):
        spawned.launch(lambda: None)


def draw() -> tuple[object, ...]:
    flags = torch.get_deterministic_debug_mode(), torch.backends.cudnn.benchmark
    return torch.initial_seed(), torch.rand(1).item(), random.random(), numpy.random.rand(), *flags


def test_copies_begin_with_the_random_numbers_and_settings_of_the_program() -> None:
    run = runtime(accelerator="cpu", devices=2, strategy=DDPStrategy(start_method="forkserver"))
    with isolate_rng():
        seed_everything(7, verbose=False)
        torch.rand(3)
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.benchmark = True
        try:
            assert run.launch(draw) == draw()
        finally:
            torch.use_deterministic_algorithms(False)
            torch.backends.cudnn.benchmark = False


class Owner:
    """In the place of a Trainer: its state in the first copy comes back."""

    def __init__(self) -> None:
        self.learned: object = None

    def work(self) -> str:
        self.learned = {"metric": torch.tensor(3.0)}
        return "done"

    def export_results(self) -> object:
        return self.learned

    def import_results(self, results: object) -> None:
        self.learned = results


def test_the_owners_results_come_back_from_the_copies() -> None:
    owner = Owner()
    run = runtime(accelerator="cpu", devices=2, strategy="ddp_fork")
    assert run.launch(owner.work, trainer=owner) == "done"
    assert owner.learned == {"metric": torch.tensor(3.0)}


class MadeLater(Classifier):
    """Makes layers in a hook, and has a state that is no tensor."""

    hook = "configure_model"
    state = "old"

    def get_extra_state(self) -> str:
        return self.state

    def set_extra_state(self, state: str) -> None:
        self.state = state

    def make(self) -> None:
        self.layers = nn.Sequential(nn.Linear(8, 2), nn.Linear(2, 2)).requires_grad_()

    def configure_model(self) -> None:
        if self.hook == "configure_model":
            self.make()

    def setup(self, stage: str) -> None:
        if self.hook == "setup":
            self.make()

    def on_train_end(self) -> None:
        self.state = "new"


@pytest.mark.parametrize("hook", ["configure_model", "setup"])
def test_results_of_copies_come_back_also_where_hooks_have_made_layers(hook: str, tmp_path: Path) -> None:
    model = MadeLater()
    model.hook = hook
    checkpoint = ModelCheckpoint(tmp_path)
    trainer = quiet(devices=2, strategy="ddp_fork", callbacks=[checkpoint], enable_checkpointing=True, max_steps=1)
    if hook == "setup":
        with refused(RuntimeError, fix="configure_model()", says=("ddp_fork", "layers.1.weight")):
            trainer.fit(model, loader(8))
    else:
        trainer.fit(model, loader(8))
        assert model.state == "new"
        assert torch.equal(
            model.layers[1].weight, torch.load(checkpoint.best_model_path)["state_dict"]["layers.1.weight"]
        )
        with warned(UserWarning, fix="a BasePredictionWriter", says="first of 2 processes only"):
            assert len(torch.cat(trainer.predict(model, loader(12)))) == 6
    assert trainer.global_step == 1
    assert Path(checkpoint.best_model_path).exists()


class Changes(Classifier):
    """Brings its own callback, changes what no ``state_dict`` has, and saves a part of its weights."""

    strict_loading = False
    batches = 0

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.register_buffer("count", torch.zeros(()), persistent=False)

    def configure_callbacks(self) -> list[L.Callback]:
        return [EarlyStopping("val_loss"), ModelCheckpoint(self.folder, monitor="val_loss")]

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {name: value for name, value in super().state_dict(*args, **kwargs).items() if "layers.3" in name}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.batches += 1
        self.count += 1
        self.log("share", torch.tensor(1 / 3, dtype=torch.float64))
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        # As a callback does, so that it comes back as a number of the host.
        assert self.trainer.callback_metrics["share"].dtype == torch.float64
        self.layers[0].requires_grad_(False)


def test_all_that_a_run_changes_comes_back_from_the_copies(tmp_path: Path) -> None:
    found = []
    for strategy in ("ddp_fork", "auto"):
        seed_everything(1, verbose=False)
        model = Changes(tmp_path / strategy)
        trainer = quiet(strategy=strategy, enable_checkpointing=True)
        trainer.fit(model, loader(8), loader(8))
        best = Path(trainer.checkpoint_callback.best_model_path)
        assert best.is_file()
        assert len(trainer.early_stopping_callbacks) == 1
        assert float(trainer.early_stopping_callback.best_score) == float(trainer.callback_metrics["val_loss"])
        assert float(trainer.callback_metrics["share"]) == 1 / 3
        frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
        found.append((best.relative_to(model.folder), model.batches, model.count.item(), frozen))
        found.append([parameter.tolist() for parameter in model.parameters()])
        # The callbacks of this call are new ones.
        assert trainer.test(model, loader(8), ckpt_path="best", verbose=False)
    assert found[:2] == found[2:]


# -- a run within a rank of another one

NESTED = """
import os, subprocess, sys
import hasten as L

def work(fabric):
    if len(sys.argv) > 1:
        print(f"inner {sorted(fabric.all_gather(fabric.global_rank).tolist())}\\n", end="", flush=True)
    else:
        subprocess.run([os.environ["PYTHON_OF_TEST"], __file__, "inner"], check=True)
    fabric.barrier()

if __name__ == "__main__":
    L.Fabric(accelerator="cpu", devices=2, strategy="ddp").launch(work)
"""


def test_a_program_that_a_rank_starts_can_have_processes_of_its_own(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(NESTED)
    # The programs that the ranks start are copies, and the other ranks of each.
    copying = copying_python(tmp_path) | started_copies(1)
    process = Forked((program,), PYTHON_OF_TEST=copying.pop("PYTHON_EXEC"), **copying)
    output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, output
    assert output.count("inner [0, 1]") == 4


# -- several machines

ON_TWO_MACHINES = """
from hasten.resolve import runtime

if __name__ == "__main__":
    run = runtime(accelerator="cpu", devices=1, num_nodes=2, strategy="ddp")
    print(run.launch(lambda: run.strategy.gather_objects(run.global_rank)), flush=True)
"""


def test_a_machine_that_waits_prints_what_to_start_on_the_others(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(ON_TWO_MACHINES)

    port = str(find_free_port())

    def start_machine(node_rank: int) -> Forked:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "NODE_RANK": str(node_rank)}
        return Forked((program, "--some", "option"), **place)

    second = start_machine(1)
    try:
        text = second.stdout.readline() + second.stdout.readline()
        assert f"NODE_RANK=1 waits at 127.0.0.1:{port} for the others of num_nodes=2 machines" in text
        assert re.search(rf"MASTER_ADDR=127.0.0.1 MASTER_PORT={port} NODE_RANK=... .*program.py --some option", text)
        first = start_machine(0)
        outputs = [process.communicate(timeout=SECONDS)[0].splitlines() for process in (first, second)]
        assert [lines[-1] for lines in outputs] == ["[0, 1]"] * 2
    finally:
        second.kill()
        second.wait()


def test_a_timeout_that_cannot_be_is_refused_when_it_is_given() -> None:
    with refused(ValueError, "timeout"):
        DDPStrategy(timeout=timedelta(seconds=-1))


OF_BACKEND = """
import hasten as L
from hasten.strategies import DDPStrategy

L.Fabric(accelerator="cpu", devices=2, strategy=DDPStrategy(process_group_backend={backend!r})).launch(print)
"""
# A build for CPUs knows the name of NCCL, and has none.
BACKENDS = {"gloooo": "Did you mean 'gloo'?"}
if not torch.distributed.is_nccl_available():
    BACKENDS["nccl"] = "use 'gloo'"


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backend_that_torch_does_not_have_is_refused_when_the_group_is_made(backend: str, tmp_path: Path) -> None:
    # A program may register its own backend until then.
    (tmp_path / "program.py").write_text(OF_BACKEND.format(backend=backend))
    process = Forked((tmp_path / "program.py",), cwd=tmp_path, **started_copies(1))
    text = process.communicate(timeout=SECONDS)[0]
    assert process.returncode != 0
    assert f"DDPStrategy(process_group_backend={backend!r})" in text
    assert BACKENDS[backend] in text
    DDPStrategy(process_group_backend="cpu:gloo,cuda:nccl")

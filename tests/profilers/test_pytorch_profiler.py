"""PyTorchProfiler: the trace and the table of a few batches, on the CPU."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerAction, schedule

from hasten.loggers import CSVLogger
from hasten.profilers import PyTorchProfiler
from tests.models import Classifier, loader, quiet
from tests.refusals import warned

STEP = "[pl][profile][Strategy]SingleDeviceStrategy.{}_step"


def traces(folder: Path) -> dict[str, dict[str, int]]:
    """Return how often each named range is in each trace of a folder, by the stage in the file's name."""
    found = {}
    for path in sorted(folder.glob("*.pt.trace.json")):
        stage = re.findall(r"\.(\w+)_step\.", path.name)[0]
        names: dict[str, int] = {}
        for event in json.loads(path.read_text())["traceEvents"]:
            name = event.get("name", "")
            if event.get("cat") == "user_annotation":
                names[name] = names.get(name, 0) + 1
        found[stage] = names
    return found


def profiled(tmp_path: Path, *, fit: bool = True, samples: int = 40, arguments: Any = None, **options: Any) -> str:
    """Run a fit (or a test); return the report."""
    profiler = PyTorchProfiler(dirpath=tmp_path, filename="ops", **options)
    trainer = quiet(profiler=profiler, **{"num_sanity_val_steps": 2, **(arguments or {})})
    if fit:
        trainer.fit(Classifier(), loader(samples), loader(samples))
    else:
        trainer.test(Classifier(), loader(samples), verbose=False)
    return (tmp_path / f"{'fit' if fit else 'test'}-ops.txt").read_text()


def test_by_default_three_batches_of_each_stage(tmp_path: Path) -> None:
    # Three batches of the sanity check would begin a cycle that takes the place of training's.
    # All rows: which are the slowest twenty is a matter of chance.
    report = profiled(tmp_path, arguments={"num_sanity_val_steps": 3}, row_limit=-1)
    found = traces(tmp_path)
    assert set(found) == {"training", "validation"}
    training = found["training"]
    assert training[STEP.format("training")] == 3
    # A step of the trace is a whole one, with its backward and its optimizer.
    for name in ("[Strategy]SingleDeviceStrategy.backward", "[LightningModule]Classifier.optimizer_step"):
        assert training["[pl][profile]" + name] == 3
    assert training["[pl][profile][_TrainingEpochLoop].train_dataloader_next"] == 3
    assert [name for name in training if name.startswith("ProfilerStep#")] == [f"ProfilerStep#{n}" for n in (2, 3, 4)]
    assert training["[pl][module]torch.nn.modules.linear.Linear: layers.0"] == 3
    assert STEP.format("validation") not in training
    assert found["validation"][STEP.format("validation")] == 3
    assert STEP.format("training") not in found["validation"]
    assert "FIT Profiler Report" in report
    assert "Profile stats for: [Strategy]SingleDeviceStrategy.training_step\n" in report
    assert "Profile stats for: [Strategy]SingleDeviceStrategy.validation_step\n" in report
    assert "aten::addmm" in report


def test_a_quick_check_is_recorded_whole_and_a_run_that_is_too_short_warns(tmp_path: Path) -> None:
    profiled(tmp_path, arguments={"fast_dev_run": 2})
    (found,) = traces(tmp_path).values()
    assert (found[STEP.format("training")], found[STEP.format("validation")]) == (2, 2)
    # Fewer batches than the default schedule needs: all are recorded.
    with warned(UserWarning, says="2 batches"):
        quiet(profiler=PyTorchProfiler(dirpath=tmp_path / "short")).fit(Classifier(), loader(8), loader(40))
    found = traces(tmp_path / "short")
    assert (found["training"][STEP.format("training")], found["validation"][STEP.format("validation")]) == (2, 3)
    mine = PyTorchProfiler(dirpath=tmp_path / "mine", schedule=schedule(wait=2, warmup=1, active=1))
    with warned(UserWarning, says="schedule=None"):
        quiet(profiler=mine).fit(Classifier(), loader(8))
    # Batches count over all epochs.
    quiet(profiler=PyTorchProfiler(dirpath=tmp_path / "long"), max_epochs=4).fit(Classifier(), loader(8))
    assert traces(tmp_path / "long")["training"][STEP.format("training")] == 3


def test_a_schedule(tmp_path: Path) -> None:
    quiet(profiler=PyTorchProfiler(dirpath=tmp_path)).predict(Classifier(), loader())
    assert traces(tmp_path)["predict"][STEP.format("predict")] == 3
    profiled(tmp_path, schedule=schedule(wait=2, warmup=1, active=5))
    training = traces(tmp_path)["training"]
    assert training[STEP.format("training")] == 5
    assert next(name for name in training if name.startswith("ProfilerStep#")) == "ProfilerStep#3"
    profiled(tmp_path, fit=False, schedule=None)  # Without one, all batches are recorded.
    assert traces(tmp_path)["test"][STEP.format("test")] == 10
    PyTorchProfiler(schedule=lambda step: ProfilerAction.NONE)


def test_the_trace_is_beside_the_logs_by_default(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    quiet(profiler="pytorch", logger=CSVLogger(tmp_path, name="", version="run")).fit(Classifier(), loader())
    assert list(traces(tmp_path / "run")) == ["training"]
    assert "ProfilerStep*" in caplog.text


def test_what_becomes_of_a_trace_can_be_chosen(tmp_path: Path) -> None:
    ready: list[Any] = []
    profiled(tmp_path, on_trace_ready=lambda profiler: ready.append(profiler.step_num))
    assert ready == [5, 10]
    assert traces(tmp_path) == {}


def test_the_table(tmp_path: Path) -> None:
    options: dict[str, Any] = {"group_by_input_shapes": True, "record_shapes": True, "profile_memory": True}
    options |= {"export_to_flame_graph": True, "export_to_chrome": False, "record_module_names": False, "row_limit": -1}
    report = profiled(tmp_path, fit=False, **options)
    assert "[4, 8]" in report
    assert "CPU Mem" in report
    assert "[pl][module]" not in report
    (path,) = tmp_path.glob("*.stack")
    assert "test_step" in path.name
    assert traces(tmp_path) == {}
    report = profiled(tmp_path, row_limit=2, sort_by_key="count", table_kwargs={"header": "my header"})
    assert report.count("my header") == 2
    first = report.split("Profile stats for: ")[1]
    body = re.split(r"\n-+  [- ]+\n", first)[2]
    counts = [int(line.split()[-1]) for line in body.strip().splitlines()]
    assert len(counts) == 2
    assert counts == sorted(counts, reverse=True)


def test_alone_everything_is_recorded(tmp_path: Path) -> None:
    profiler = PyTorchProfiler(dirpath=tmp_path)
    for _ in range(2):
        with profiler.profile("outside"), profiler.profile("multiply"):
            torch.ones(2, 2) @ torch.ones(2, 2)
    summary = profiler.summary()
    assert "[pl][profile]multiply" in summary
    assert "aten::mm" in summary
    assert {event.name: event.count for event in profiler.function_events if "multiply" in event.name}
    profiler.teardown("fit")
    assert profiler.profiler is None
    # The last results stay, until the next recording.
    assert profiler.summary() == summary
    with profiler.profile("again"):
        torch.ones(2)
    summary = profiler.summary()
    assert "aten::mm" not in summary
    assert "[pl][profile]again" in summary
    pickle.dumps(profiler)


def test_no_folder_and_off() -> None:
    profiler, off = PyTorchProfiler(), PyTorchProfiler(enabled=False)
    with profiler.profile("a"):
        torch.ones(2) + 1
    with warned(UserWarning, says="dirpath="):
        profiler.summary()
    with off.profile("a"):
        torch.ones(2) + 1
    assert (off.profiler, off.summary()) == (None, "")


def test_an_error_ends_the_recording(tmp_path: Path) -> None:
    class Fails(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 3:
                raise ZeroDivisionError
            return super().training_step(batch, batch_idx)

    model = Fails()
    with pytest.raises(ZeroDivisionError):
        quiet(profiler=PyTorchProfiler(dirpath=tmp_path)).fit(model, loader())
    assert not torch.autograd._profiler_enabled()
    assert not any(child._forward_hooks for child in model.modules())
    assert "training" in traces(tmp_path)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"sort_by_key": "cpu_tim"}, ValueError, "sort_by_key='cpu_tim'.*Did you mean 'cpu_time'"),
        ({"schedule": 3}, ValueError, "schedule=3.*torch.profiler.schedule"),
        ({"schedule": lambda step: step}, ValueError, "return a `torch.profiler.ProfilerAction`"),
        ({"table_kwargs": {"row_limit": 3}}, KeyError, "Pass row_limit="),
        ({"table_kwargs": {"sort_by": "a"}}, KeyError, "Pass sort_by_key="),
        ({"table_kwargs": {"hedder": "a"}}, KeyError, "Did you mean 'header'"),
        ({"record_shape": True}, TypeError, "Did you mean 'record_shapes'"),
        *([({"emit_nvtx": True}, ValueError, "emit_nvtx=True.*need a CUDA device")] * (not torch.cuda.is_available())),
    ],
)
def test_bad_arguments(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        PyTorchProfiler(**options)


def test_a_profiler_from_another_process_changes_no_losses(tmp_path: Path) -> None:
    def weights(**arguments: Any) -> Any:
        torch.manual_seed(3)
        model = Classifier()
        quiet(**arguments).fit(model, loader())
        return model.state_dict()

    sent = pickle.loads(pickle.dumps(PyTorchProfiler(dirpath=tmp_path, row_limit=3)))
    one, other = weights(), weights(profiler=sent)
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert traces(tmp_path)["training"][STEP.format("training")] == 3

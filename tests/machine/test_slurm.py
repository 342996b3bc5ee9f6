"""A job of SLURM that is signaled before its time is over goes on in a requeued one."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.models import Classifier, loader, quiet
from tests.programs import fork_python
from tests.refusals import refused

from hasten.machine.cluster import SLURMEnvironment
from hasten.trainer import requeue

PROGRAM = Path(__file__).with_name("slurm_program.py")


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, list[int]], Path]:
    """Run the program with a ``scontrol`` that notes its arguments; return the exit codes, and the folder."""
    folder = tmp_path_factory.mktemp("slurm")
    scontrol = folder / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {folder}/scontrol.txt\n')
    scontrol.chmod(0o755)
    done = fork_python(PROGRAM, folder, PATH=f"{scontrol.parent}{os.pathsep}{os.environ['PATH']}")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), folder


def report(folder: Path, name: str) -> Any:
    """Return the first and last step and the weights of a job, after comparing its tasks."""
    first, second = (json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    return first


def test_the_requeued_job_goes_on_at_the_step_where_all_tasks_stopped(jobs: Any) -> None:
    codes, folder = jobs
    assert codes["undisturbed"] == [0, 0]
    assert codes["signaled"] == [128 + signal.SIGUSR1] * 2
    _, stopped_at, _ = report(folder, "signaled")
    assert 4 < stopped_at < 60
    # The second fit of the program, after one to warm up.
    assert [path.name for path in (folder / "b").glob("hpc_ckpt_*")] == ["hpc_ckpt_77-fit2.ckpt"]
    assert codes["requeued"] == [0, 0]
    first, last, weights = report(folder, "requeued")
    assert (first, last) == (stopped_at, 60)
    assert weights == report(folder, "undisturbed")[2]
    assert "This job was requeued: it continues from" in (folder / "requeued-0.txt").read_text()


def test_each_job_is_requeued_once_by_its_own_name(jobs: Any) -> None:
    codes, folder = jobs
    assert codes["of another signal"] == [128 + signal.SIGUSR2] * 2
    assert (folder / "scontrol.txt").read_text().splitlines() == ["requeue 77", "requeue 70_9"]
    assert [path.name for path in (folder / "c").glob("hpc_ckpt_*")] == ["hpc_ckpt_70_9-fit2.ckpt"]
    # Only the task that had the signal called it.
    said = [(folder / f"signaled-{rank}.txt").read_text().count("user's handler was called") for rank in (0, 1)]
    assert said == [0, 1]


def test_sigterm_ends_a_job_without_requeueing_it(jobs: Any) -> None:
    codes, folder = jobs
    assert codes["terminated"] == [143, 143]
    assert not list((folder / "d").glob("hpc_ckpt_*"))


def test_another_job_in_the_same_folder_begins_anew_unless_asked(jobs: Any) -> None:
    codes, folder = jobs
    assert codes["another job there"] == codes["asked to go on"] == [0, 0]
    assert report(folder, "another job there")[:2] == [0, 3]
    # All of its three steps were done.
    assert report(folder, "asked to go on")[0] == -1


def test_each_fit_of_a_job_has_a_file_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(requeue, "_fits", 0)
    trainer = quiet(plugins=SLURMEnvironment(), default_root_dir=tmp_path, max_steps=1)
    trainer.fit(Classifier(), loader())
    assert requeue.own_path(trainer) is None  # not in a job
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    assert requeue.own_path(trainer) == str(tmp_path / "hpc_ckpt_5.ckpt")
    trainer.validate(Classifier(), loader(), verbose=False)
    trainer.fit(Classifier(), loader())
    assert requeue.own_path(trainer) == str(tmp_path / "hpc_ckpt_5-fit2.ckpt")
    with refused(FileNotFoundError, "ckpt_path", says="ckpt_path='hpc'"):
        trainer.fit(Classifier(), loader(), ckpt_path="hpc")


def test_a_job_that_cannot_be_requeued_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    cluster = SLURMEnvironment()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "scontrol requeue 5: " in cluster.requeue()
    scontrol = tmp_path / "scontrol"
    scontrol.write_text("#!/bin/sh\necho no such job >&2\nexit 1\n")
    scontrol.chmod(0o755)
    assert cluster.requeue() == "scontrol requeue 5 ended with 1: no such job"


def test_signals_at_which_a_job_is_requeued(monkeypatch: pytest.MonkeyPatch) -> None:
    assert SLURMEnvironment().stop_signals == ()  # not in a job
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    assert SLURMEnvironment().stop_signals == (signal.SIGUSR1,)
    assert SLURMEnvironment(auto_requeue=False).stop_signals == ()
    assert SLURMEnvironment(requeue_signal=signal.SIGHUP).stop_signals == (signal.SIGHUP,)
    for number in (signal.SIGKILL, 999, "USR1"):
        with refused(ValueError, "requeue_signal"):
            SLURMEnvironment(requeue_signal=number)  # type: ignore[arg-type]

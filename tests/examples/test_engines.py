"""The files in examples/engines start the program beside them, or are what their engines take."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import yaml

from hasten_lightning.commands.run import parse_program
from hasten_tools.commands.launch import make_parser
from tests.programs import ROOT, copying_python, environment_of_python, run_python

datasets = pytest.importorskip("sklearn.datasets")
ENGINES = ROOT / "examples" / "engines"
SCHEMAS: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("engine_schemas.yaml").read_text(encoding="utf-8"))
# Two tasks on this machine, with the variables that SLURM sets.
SRUN = """#!/bin/bash
export SLURM_NTASKS=2 SLURM_JOB_ID=71 SLURM_JOB_NAME=digits SLURM_NODEID=0 SLURM_NODELIST=localhost
SLURM_PROCID=0 SLURM_LOCALID=0 "$@" & first=$!
SLURM_PROCID=1 SLURM_LOCALID=1 "$@" & second=$!
wait $first && wait $second
"""

DIGITS = """
from pathlib import Path
from types import SimpleNamespace
import numpy

def load_digits():
    return SimpleNamespace(**numpy.load(Path(__file__).parents[1] / "digits.npz"))
"""


def run_script(name: str, folder: Path, *words: str, **environment: str) -> str:
    """Run a script of examples/engines where ``python`` and ``torchrun`` are those of this test; return its output."""
    programs, packages = folder / "bin", folder / "packages"
    for each in (programs, packages):
        each.mkdir(exist_ok=True)
    # The digits without what else there is in sklearn, which takes two seconds in each process.
    digits = datasets.load_digits()
    np.savez(packages / "digits.npz", data=digits.data, target=digits.target)
    (packages / "sklearn").mkdir(exist_ok=True)
    (packages / "sklearn" / "__init__.py").touch()
    (packages / "sklearn" / "datasets.py").write_text(DIGITS)
    environment |= copying_python(programs)
    for program, text in (("torchrun", '#!/bin/sh\nexec python -m torch.distributed.run "$@"\n'), ("srun", SRUN)):
        (programs / program).write_text(text)
        (programs / program).chmod(0o755)
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    usual = environment_of_python()
    done = subprocess.run(
        ["bash", str(ENGINES / name), *words],
        cwd=ENGINES,
        env={
            **usual,
            **environment,
            "HOME": str(folder),
            "PATH": path,
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONPATH": f"{packages}{os.pathsep}{usual['PYTHONPATH']}",
        },
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def steps_of_two(printed: str) -> int:
    """Return how many steps two processes have made, after a look at what they reached."""
    (line,) = [line for line in printed.splitlines() if line.startswith("result:")]
    found = re.fullmatch(r"result: accuracy ([\d.]+) after (\d+) steps of 2 processes", line)
    assert found is not None, line
    assert float(found[1]) > 0.2
    return int(found[2])


def test_a_run_that_torchrun_began_goes_on_in_a_job_of_slurm(tmp_path: Path) -> None:
    # 1,797 images in batches of 32 on each of the two.
    assert steps_of_two(run_script("torchrun.sh", tmp_path, "--epochs", "1", PROCESSES="2")) == 29
    runs = tmp_path / "runs" / "digits"
    assert sorted(path.name for path in runs.iterdir()) == ["epoch=0-step=29.ckpt", "last.ckpt"]
    job = {"SLURM_NNODES": "1", "SLURM_NTASKS_PER_NODE": "2"}
    assert steps_of_two(run_script("slurm.sbatch", tmp_path, "--epochs", "2", **job)) == 2 * 29
    # Without the first epoch, whose file the second one has replaced.
    assert sorted(path.name for path in runs.iterdir()) == ["epoch=1-step=58.ckpt", "last.ckpt"]


def test_the_options_of_the_script_are_those_of_sbatch_and_requeue_the_job() -> None:
    text = (ENGINES / "slurm.sbatch").read_text(encoding="utf-8")
    given = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", text, re.MULTILINE))
    assert len(given) == text.count("#SBATCH")
    assert given.keys() <= set(SCHEMAS["sbatch"])
    assert given["ntasks-per-node"] == given["gpus-per-node"]
    assert (given["signal"], given["open-mode"]) == ("USR1@120", "append")
    assert "requeue" in given
    # Where SLURM itself would not start the processes.
    assert given["job-name"] not in ("bash", "interactive")
    # Nothing runs before the options: sbatch reads them up to the first command.
    assert text.index("srun") > text.rindex("#SBATCH")


def containers(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the containers of a manifest, wherever they are."""
    found: list[dict[str, Any]] = manifest.get("containers", [])
    for value in manifest.values():
        for inner in value if isinstance(value, list) else [value]:
            found = found + (containers(inner) if isinstance(inner, dict) else [])
    return found


def check_launch(words: list[str]) -> Any:
    """Check a line of ``hasten launch`` that runs train.py; return its options."""
    assert words[:2] == ["hasten", "launch"]
    given, rest = parse_program(make_parser(), words[2:])
    assert given.program == "train.py"
    runpy.run_path(str(ENGINES / "train.py"))["options"]().parse_args(rest)
    assert given.restarts > 0
    return given


@pytest.mark.parametrize(("name", "pods"), [("pytorchjob", "digits-worker-0"), ("jobset", "digits-workers-0-0.digits")])
def test_manifests_of_kubernetes_are_what_their_schemas_say(name: str, pods: str) -> None:
    manifest = yaml.safe_load((ENGINES / f"{name}.yaml").read_text(encoding="utf-8"))
    jsonschema.validate(manifest, SCHEMAS[name] | {"$defs": SCHEMAS["$defs"]})
    (container,) = containers(manifest)
    given = check_launch(container["command"])
    host, _, port = given.rdzv.partition(":")
    assert host == pods
    assert int(port) in [each["containerPort"] for each in container["ports"]]
    assert given.procs == container["resources"]["limits"]["nvidia.com/gpu"]
    spec = manifest["spec"]
    if name == "pytorchjob":
        number = spec["pytorchReplicaSpecs"]["Worker"]["replicas"]
    else:
        number = spec["replicatedJobs"][0]["template"]["spec"]["parallelism"]
    assert given.nodes == (number, number)


def test_the_manifests_of_kubernetes_agree_with_themselves() -> None:
    job = yaml.safe_load((ENGINES / "pytorchjob.yaml").read_text(encoding="utf-8"))["spec"]
    policy, worker = job["elasticPolicy"], job["pytorchReplicaSpecs"]["Worker"]
    assert policy["minReplicas"] == policy["maxReplicas"] == worker["replicas"]
    # The operator looks for both names.
    (container,) = containers(worker)
    assert (container["name"], container["ports"][0]["name"]) == ("pytorch", "pytorchjob-port")
    (replicated,) = yaml.safe_load((ENGINES / "jobset.yaml").read_text(encoding="utf-8"))["spec"]["replicatedJobs"]
    spec = replicated["template"]["spec"]
    assert spec["parallelism"] == spec["completions"]


def test_the_task_of_skypilot_is_what_its_schema_says_and_starts_hasten_launch(tmp_path: Path) -> None:
    task = yaml.safe_load((ENGINES / "skypilot.yaml").read_text(encoding="utf-8"))
    jsonschema.validate(task, SCHEMAS["skypilot"])
    (tmp_path / "hasten").write_text('#!/bin/bash\nprintf "%q " hasten "$@"\n')
    (tmp_path / "hasten").chmod(0o755)
    variables = {
        "SKYPILOT_NODE_IPS": "10.0.0.7\n10.0.0.8", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NUM_GPUS_PER_NODE": "8",
        "SKYPILOT_TASK_ID": "sky-managed-2026-11-24-digits-1-0", "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
    }  # fmt: skip
    printed = subprocess.run(["bash", "-c", task["run"]], env=variables, capture_output=True, text=True, check=True)
    given = check_launch(shlex.split(printed.stdout))
    assert (given.nodes, given.procs, given.rdzv) == ((2, 2), 8, "10.0.0.7:29400")


@pytest.mark.parametrize("lost", [False, True])
def test_ray_train_feeds_two_workers_and_starts_them_again_when_one_is_lost(lost: bool, tmp_path: Path) -> None:
    pytest.importorskip("ray.train")
    pytest.importorskip("ray.data")
    words = ["lose"] if lost else []
    done = run_python(ENGINES / "ray_train.py", *words, cwd=tmp_path, RAY_TRAIN_V2_ENABLED="1")
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("result:")]
    found = re.fullmatch(r"result: accuracy ([\d.]+) after (\d+) steps of 2 workers", line)
    assert found is not None, line
    assert float(found[1]) > 0.85
    # Five epochs of 898 images each, in batches of 32.
    assert int(found[2]) == 5 * 29


def test_each_engine_is_on_the_page_with_a_file_that_exists() -> None:
    page = (ROOT / "docs" / "engines.md").read_text(encoding="utf-8")
    linked = set(re.findall(r"\]\(\.\./examples/engines/([\w.]+)\)", page))
    assert linked == {path.name for path in ENGINES.iterdir() if path.is_file()}
    assert len(page.split()) <= 1500

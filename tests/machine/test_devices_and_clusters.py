"""Devices and clusters as users and launchers name them."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.models import Classifier, loader
from tests.refusals import refused, warned
from torch.testing._internal.distributed.fake_pg import FakeStore

from hasten import Fabric, Trainer
from hasten._lib.rank_zero import rank_zero_only
from hasten.accelerators import CPUAccelerator, CUDAAccelerator, MPSAccelerator
from hasten.machine.cluster import (
    ClusterEnvironment,
    KubeflowEnvironment,
    LightningEnvironment,
    LSFEnvironment,
    MPIEnvironment,
    ProcessGroupEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
    find_cluster,
    first_host,
)
from hasten.resolve import runtime
from hasten.strategies import DDPStrategy
from hasten.utilities.warnings import PossibleUserWarning
from hasten_lightning.conventions import LIGHTNING


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("devices", "indices"),
    [(1, [0]), (2, [0, 1]), ("2", [0, 1]), (-1, [0, 1]), ("-1", [0, 1]), ([1], [1]), ((1, 0), [1, 0]),
     ("0,1", [0, 1]), ("1,", [1]), (" 0, 1 ", [0, 1])],
)  # fmt: skip
def test_gpus_as_users_name_them(devices: Any, indices: list[int]) -> None:
    assert CUDAAccelerator.parse_devices(devices) == indices
    assert CUDAAccelerator.get_parallel_devices(devices) == [torch.device("cuda", i) for i in indices]


def test_indices_of_gpus_are_devices_also_where_there_are_none() -> None:
    assert CUDAAccelerator.get_parallel_devices([3, 1]) == [torch.device("cuda", 3), torch.device("cuda", 1)]
    assert CUDAAccelerator.get_parallel_devices([]) == []


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("devices", "kind", "argument"),
    [
        (8, ValueError, "devices"),
        (0, ValueError, "devices"),
        (-2, ValueError, "devices"),
        ([2], ValueError, "devices"),
        ([0, 0], ValueError, "devices"),
        ([], ValueError, "devices"),
        ("a,b", ValueError, "devices"),
        (["0"], ValueError, "devices"),
        ([True], ValueError, "devices"),
        (2.5, TypeError, "devices"),
        ({0}, TypeError, "devices"),
    ],
)
def test_gpus_that_are_not_there(devices: Any, kind: type[Exception], argument: str) -> None:
    with refused(kind, argument):
        CUDAAccelerator.parse_devices(devices)


@pytest.mark.parametrize(
    ("devices", "kind"), [(0, ValueError), (-1, ValueError), ("x", ValueError), ([0, 1], TypeError), (None, TypeError)]
)
def test_the_cpu_takes_a_number_of_processes(devices: Any, kind: type[Exception]) -> None:
    assert CPUAccelerator.get_parallel_devices("3") == [torch.device("cpu")] * 3
    with refused(kind, "devices"):
        CPUAccelerator.parse_devices(devices)


def test_mps_is_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.backends.mps.is_available():
        with refused(ValueError, "devices", says="0 MPS devices", fix="accelerator='cpu'"):
            MPSAccelerator.parse_devices(1)
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: True)
    assert MPSAccelerator.get_parallel_devices(1) == [torch.device("mps", 0)]
    with refused(ValueError, "devices", fix="1"):
        MPSAccelerator.parse_devices(2)
    for accelerator in (CPUAccelerator(), CUDAAccelerator(), MPSAccelerator()):
        with refused(ValueError, says="got meta instead"):
            accelerator.setup_device(torch.device("meta"))


# -- clusters


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHELASTIC_RUN_ID", "SLURM_NTASKS", "SLURM_JOB_NAME", "LOCAL_RANK", "RANK", "WORLD_SIZE",
                 "MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "GROUP_RANK"):  # fmt: skip
        monkeypatch.delenv(name, raising=False)


def test_the_process_that_starts_those_of_another_machine_knows_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_zero_only, "rank", 0)
    monkeypatch.setenv("NODE_RANK", "1")
    for kind in (Trainer, Fabric):
        made = kind(accelerator="cpu", devices=2, num_nodes=2, strategy="ddp")
        assert (made.global_rank, made.local_rank, made.is_global_zero) == (2, 0, False)
    assert rank_zero_only.rank == 2


def test_without_a_cluster_hasten_starts_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = find_cluster()
    assert type(cluster) is LightningEnvironment
    assert not cluster.creates_processes_externally
    assert (cluster.local_rank(), cluster.node_rank(), cluster.main_address) == (0, 0, "127.0.0.1")
    assert cluster.main_port == cluster.main_port > 0
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("NODE_RANK", "1")
    assert cluster.creates_processes_externally
    assert (cluster.local_rank(), cluster.node_rank()) == (3, 1)


TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "x", "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1", "MASTER_ADDR": "host", "MASTER_PORT": "1234",
}  # fmt: skip
SLURM = {
    "SLURM_NTASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
    "SLURM_NODELIST": "gpu[07-08]", "SLURM_JOB_ID": "123456", "SLURM_JOB_NAME": "train",
}  # fmt: skip


# One process in each pod.
KUBEFLOW = {
    "KUBERNETES_PORT": "tcp://10.0.0.1:443", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456", "RANK": "3",
    "WORLD_SIZE": "4",
}  # fmt: skip


@pytest.mark.parametrize(
    ("variables", "kind", "place", "message"),
    [
        (TORCHRUN, TorchElasticEnvironment, ("host", 1234), "torchrun started 4 processes"),
        (SLURM, SLURMEnvironment, ("gpu07", 18456), "SLURM started 4 processes"),
        ({**SLURM, "SLURM_JOB_NAME": "bash"}, LightningEnvironment, None, ""),
        (
            {**TORCHRUN, "HASTEN_LAUNCHER": "hasten launch"},
            TorchElasticEnvironment,
            ("host", 1234),
            "hasten launch started 4 processes",
        ),
        ({**TORCHRUN, **KUBEFLOW}, TorchElasticEnvironment, ("job-master-0", 23456), "torchrun started 4"),
    ],
    ids=["torchrun", "slurm", "a shell in a slurm job", "hasten launch", "torchrun in a pod"],
)
def test_launchers_are_recognized(
    variables: dict[str, str], kind: type, place: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    cluster = find_cluster()
    assert type(cluster) is kind
    if place is None:
        return
    assert cluster.creates_processes_externally
    ranks = (cluster.global_rank(), cluster.local_rank(), cluster.node_rank(), cluster.world_size())
    assert ranks == (3, 1, 1, 4)
    assert (cluster.main_address, cluster.main_port) == place
    cluster.validate_settings(2, 2)
    with pytest.raises(ValueError, match=message):
        cluster.validate_settings(3, 1)


def replay(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> tuple[type, tuple[int, ...], tuple[str, int]]:
    """Return the cluster that is found, its ranks (global, local, node, number) and the place where all connect."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    cluster = find_cluster()
    assert cluster.creates_processes_externally
    with refused(ValueError, "devices", says=f"{cluster.world_size()}"):
        cluster.validate_settings(3, 1)
    cluster.validate_settings(cluster.world_size(), 1)
    cluster.set_global_rank(7)
    cluster.set_world_size(7)
    ranks = cluster.global_rank(), cluster.local_rank(), cluster.node_rank(), cluster.world_size()
    return type(cluster), ranks, (cluster.main_address, cluster.main_port)


def test_kubeflow(monkeypatch: pytest.MonkeyPatch) -> None:
    assert replay(KUBEFLOW, monkeypatch) == (KubeflowEnvironment, (3, 0, 3, 4), ("job-master-0", 23456))


def test_lsf(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hosts = tmp_path / "rankfile"
    hosts.write_text("batch1\na01\na01\na02.cluster\na02.cluster\n")
    monkeypatch.setattr("socket.gethostname", lambda: "a02")
    variables = {
        "LSB_JOBID": "712345", "LSB_DJOB_RANKFILE": str(hosts), "JSM_NAMESPACE_SIZE": "4", "JSM_NAMESPACE_RANK": "3",
        "JSM_NAMESPACE_LOCAL_RANK": "1",
    }  # fmt: skip
    assert replay(variables, monkeypatch) == (LSFEnvironment, (3, 1, 1, 4), ("a01", 10345))
    monkeypatch.setattr("socket.gethostname", lambda: "laptop")
    with refused(ValueError, says=("LSB_DJOB_RANKFILE", "a01", "a02")):
        LSFEnvironment().node_rank()
    hosts.write_text("batch1\n")
    with refused(ValueError, "LSB_DJOB_RANKFILE"):
        LSFEnvironment().main_address


class World:
    """In the place of ``MPI.COMM_WORLD``: the second process on the second of two machines."""

    def Get_size(self) -> int:
        return 4

    def Get_rank(self) -> int:
        return 3

    def allgather(self, own: tuple[str, int]) -> list[tuple[str, int]]:
        return [("b", 5000), ("b", 5001), ("a", 5002), own]


def test_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMI_SIZE", "4")
    monkeypatch.setattr("hasten.machine.cluster.installed", lambda name: False)
    assert type(find_cluster()) is LightningEnvironment
    monkeypatch.setattr("hasten.machine.cluster.installed", lambda name: True)
    module = ModuleType("mpi4py.MPI")
    module.COMM_WORLD = World()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mpi4py", ModuleType("mpi4py"))
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", module)
    monkeypatch.setattr("socket.gethostname", lambda: "a")
    assert replay({"PMI_SIZE": "4"}, monkeypatch) == (MPIEnvironment, (3, 1, 1, 4), ("b", 5000))
    # A program that mpirun started alone is like any other.
    monkeypatch.setenv("PMI_SIZE", "1")
    assert type(find_cluster()) is LightningEnvironment


def test_mpi_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with refused(ModuleNotFoundError, says="mpi4py"):
        MPIEnvironment()


def test_a_group_that_the_program_has_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=3, world_size=4)
    try:
        variables = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "host", "MASTER_PORT": "99"}
        assert replay(variables, monkeypatch) == (ProcessGroupEnvironment, (3, 1, 1, 4), ("host", 99))
        strategy = runtime(accelerator="cpu").strategy
        assert isinstance(strategy, DDPStrategy)
        assert (strategy.global_rank, strategy.world_size, strategy.num_nodes) == (3, 4, 2)
        # One that hasten has joined is that of whatever started the processes.
        group = torch.distributed.group.WORLD
        monkeypatch.setattr("hasten.machine.collectives._own_group", lambda: group)
        assert type(find_cluster()) is LightningEnvironment
    finally:
        torch.distributed.destroy_process_group()


def test_the_first_host_of_a_list() -> None:
    hosts = [first_host(nodes) for nodes in ("alpha", "alpha,beta", "host[22-24,26]", "a b")]
    assert hosts == ["alpha", "alpha", "host22", "a"]


def test_a_variable_that_is_not_a_number_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "one")
    with refused(ValueError, says="LOCAL_RANK='one'"):
        find_cluster().local_rank()


def test_a_cluster_of_a_program_that_started_another_number_of_processes() -> None:
    class Mine(SLURMEnvironment):
        validate_settings = ClusterEnvironment.validate_settings
        node_rank = local_rank = global_rank = lambda self: 0

        def world_size(self) -> int:
            return 3

    for kind in (Trainer, Fabric):
        made = kind(accelerator="cpu", devices=2, strategy="ddp", plugins=[Mine()])
        with refused(ValueError, "devices", says=("devices=2", "world size (3)", "Mine")):
            made.fit(Classifier(), loader(8)) if kind is Trainer else made.launch()


def test_what_a_scheduler_set_is_compared_with_the_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("SLURM_", "LSB_"))]:
        monkeypatch.delenv(name)
    slurm = SLURMEnvironment()
    assert slurm.main_port == 12910
    with refused(KeyError, says="SLURM_NTASKS"):
        slurm.world_size()
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "4")
    monkeypatch.setenv("SLURM_NNODES", "2")
    slurm.validate_settings(4, 2)
    with refused(ValueError, "devices", fix="devices=4"):
        slurm.validate_settings(2, 2)
    with refused(ValueError, "num_nodes", fix="num_nodes=2"):
        slurm.validate_settings(4, 1)
    monkeypatch.setenv("SLURM_JOB_NAME", "interactive")
    slurm.validate_settings(4, 1)
    monkeypatch.setenv("LSB_DJOB_RANKFILE", "")
    with refused(ValueError, says="LSB_DJOB_RANKFILE"):
        LSFEnvironment()
    monkeypatch.setenv("WORLD_SIZE", "2")
    LightningEnvironment().teardown()
    assert "WORLD_SIZE" not in os.environ


def test_srun_under_the_names_of_lightning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hasten.elsewhere.conventions._current", LIGHTNING)
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    with pytest.raises(KeyError):
        SLURMEnvironment().world_size()
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    with warned(PossibleUserWarning, says="srun"):
        assert not SLURMEnvironment.detect()
    monkeypatch.setenv("SLURM_NTASKS", "2")
    with refused(RuntimeError, says="--ntasks-per-node=2"):
        SLURMEnvironment()

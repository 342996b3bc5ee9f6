"""``hasten plan`` on meshes: equal to runs of four processes, the best mesh, and sizes that do not fit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import hasten as L
from hasten.strategies import FSDPStrategy, MeshStrategy
from hasten.strategies.mesh.sizes import MeshSizes
from hasten_tools.commands.plan import make_parser
from hasten_tools.plan import plan_fit
from hasten_tools.plan.ledger import Sent, Spread
from hasten_tools.plan.meshes import (
    candidates,
    expected_memory,
    line_of,
    processes_of,
    sizes_of,
    to_plan,
    with_experts,
)
from hasten_tools.plan.planner import chosen_mesh
from hasten_tools.plan.report import FitPlan, Measured, Speeds, parse_bandwidth
from tests.plan import on_four_processes
from tests.plan.on_four_processes import MESHES, peaks_of, planned
from tests.plan.on_two_processes import Mixture, Transformer, loader, trainer
from tests.programs import fork_python
from tests.refusals import refused

pytestmark = pytest.mark.skipif(not hasattr(__import__("os"), "fork"), reason="a plan copies this process")


# -- against real processes

# The others differ from these in what the test of two processes compares. `make plans` compares all of them.
IN_SUITE = ("2x2x1", "1x2x1x1x2", "1x2x1x2x1x2", "1x2x1x1x2 Interleaved1F1B")


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """What each of four processes held and sent in a step, by rank and mesh."""
    folder = tmp_path_factory.mktemp("plan")
    ended = fork_python(on_four_processes.__file__, folder, *IN_SUITE)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return {int(file.stem): json.loads(file.read_text(encoding="utf-8")) for file in folder.iterdir()}


@pytest.mark.parametrize("name", IN_SUITE)
def test_a_plan_equals_a_run_of_four_processes(name: str, real: dict[int, Any]) -> None:
    plan = planned(name)
    fullest, peaks = plan.measured, peaks_of(plan)
    found = real[fullest.process][name]
    assert tuple(fullest.mesh.values()) == (*MESHES[name][:3], *(size for size in MESHES[name][3:] if size > 1))
    if "pipeline" in fullest.mesh:
        # The second stage is on the other machine.
        assert list(peaks) == [0, 2]
        assert max(peaks, key=lambda process: peaks[process]) == fullest.process == 0
        # The loss and the output of the step, which the last stage sends.
        del found["sent"]["broadcast"], found["links"]["broadcast"]
    if name == "1x2x1x1x2":
        # Four micro-batches of two rows, of 40 tokens and 96 features of four bytes.
        assert fullest.links["send"] == ((0, 4 * 2 * 40 * 96 * 4),)
        assert fullest.idle == 1 / (4 + 1)
        assert "20.0% of a step" in plan.table()
    assert {name: list(shape) for name, shape in fullest.shards.items()} == found["shards"]
    assert {name: list(sent) for name, sent in fullest.sent.items()} == found["sent"]
    assert {name: [list(part) for part in parts] for name, parts in fullest.links.items()} == found["links"]
    assert peaks == {rank: pytest.approx(real[rank][name]["peak"], rel=0.005) for rank in peaks}


# -- links


def test_a_ring_over_machines_crosses_once_for_each_machine() -> None:
    # Two machines of eight: one process of each sends to the other machine.
    world = Spread.of(range(16), 8)
    sent = Sent()
    sent.add(1600, world, 1)
    assert sent.ring_bytes == 1500
    assert sent.links() == [(1500 - 1500 * 2 // 16, 1500 * 2 // 16)]
    # Copies of the same shard are on different machines.
    copies = Sent()
    copies.add(1000, Spread.of([0, 8], 8), 2)
    assert copies.links() == [(0, 1000)]
    inside = Sent()
    inside.add(1000, Spread.of(range(8, 16), 8), 2)
    assert inside.links() == [(1750, 0)]
    # Every process sends to each of the others.
    direct = Sent()
    direct.add(1600, world, 1, in_ring=False)
    assert direct.links() == [(700, 800)]


def test_links_of_a_plan() -> None:
    found = plan_fit(trainer(devices=1), _Layers(), _rows(), devices=16, num_nodes=2, mesh=(2, 8, 1)).measured
    # Shards are gathered within a machine; gradients are averaged between two.
    assert sum(between for _, between in found.links["all-gather"]) == 0
    assert sum(within for within, _ in found.links["all-gather"]) == found.sent["all-gather"][2]
    gradients = sum(between for _, between in found.links["all-reduce"])
    assert 0 < gradients <= found.sent["all-reduce"][2]


def test_seconds_are_those_of_the_slower_link() -> None:
    found = plan_fit(
        trainer(devices=1), _Layers(), _rows(), devices=16, num_nodes=2, strategy="ddp", bandwidth=(400, 10), tflops=200
    )
    (parts,) = found.measured.links.values()
    within, between = (sum(part[end] for part in parts) for end in (0, 1))
    assert within == pytest.approx(7 * between, abs=8 * len(parts))
    assert found.measured.seconds(Speeds(400, 10)) == pytest.approx(between / 10e9)
    assert found.measured.seconds(Speeds(1, 10)) == pytest.approx(within / 1e9)
    # Two layers of 64 x 256 for four rows, forward and backward; the first has no gradient of its input.
    assert found.measured.flops == (2 + 3) * 2 * 4 * 64 * 256
    assert found.measured.computing_seconds(Speeds(tflops=2)) == found.measured.flops / 2e12
    assert "exchanging takes about" in found.table()
    assert "400 GB/s within a machine and 10 GB/s between machines,\nand computes 200 TFLOP/s." in found.table()


def test_bandwidths_are_two_positive_numbers() -> None:
    assert parse_bandwidth("300,25") == Speeds(300, 25)
    for wrong in ("300", "300,25,1", "fast,slow"):
        with refused(ValueError, "bandwidth", fix="write GB/s"):
            parse_bandwidth(wrong)
    with refused(ValueError, "bandwidth", fix="positive"):
        parse_bandwidth("300,0")
    with refused(ValueError, "tflops", fix="positive"):
        Speeds(tflops=0)


# -- sizes


class _Layers(L.LightningModule):
    """Two layers with names for a plan."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # Few operations: torch searches long how each computes with what is divided twice.
        return torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9)


_PLAN = {"net.0": "colwise", "net.2": "rowwise"}
_NOT_COUNTED = "Latency is not counted, nor that a part of the exchange is hidden behind computation."


def _rows() -> DataLoader[Tensor]:
    return DataLoader(torch.randn(64, 64), batch_size=16)  # type: ignore[arg-type]


def test_automatic_sizes_follow_the_number_of_devices() -> None:
    strategy = MeshStrategy(replicate=2, shard="auto")
    found = plan_fit(trainer(devices=1), _Layers(), _rows(), devices=32, strategy=strategy).measured
    assert found.mesh == {"replicate": 2, "shard": 16, "tensor": 1}
    assert found.strategy == "mesh"


def test_sizes_that_do_not_fit_are_refused_with_sizes_that_do() -> None:
    strategy = MeshStrategy(replicate=2, shard=4, tensor=2, plan=_PLAN)
    with refused(ValueError, "mesh", fix="--mesh replicate=2,shard=8,tensor=2", says="replicate=2, shard=4, tensor=2"):
        plan_fit(trainer(devices=1), _Layers(), _rows(), devices=32, strategy=strategy)
    hybrid = FSDPStrategy(sharding_strategy="HYBRID_SHARD", device_mesh=(2, 4))
    with refused(ValueError, "mesh", fix="--mesh replicate=2,shard=16", says="device_mesh=(2, 4)"):
        plan_fit(trainer(devices=1), _Layers(), _rows(), devices=32, strategy=hybrid)
    with refused(ValueError, "mesh", fix="--mesh replicate=2,shard=16", says="32 devices"):
        plan_fit(trainer(devices=1), _Layers(), _rows(), devices=32, mesh=(2, 4, 1))
    with refused(ValueError, "mesh", fix="three sizes"):
        plan_fit(trainer(devices=1), _Layers(), _rows(), devices=32, mesh=(2, 16))
    with refused(ValueError, "mesh", fix="'auto', sizes by name"):
        plan_fit(trainer(devices=1), _Layers(), _rows(), devices=32, mesh="best")  # type: ignore[arg-type]


def test_arguments_that_contradict_a_mesh_are_refused() -> None:
    with refused(ValueError, "mesh", fix="Leave --tp out"):
        plan_fit(trainer(devices=1), _Layers(), _rows(), devices=8, mesh="auto", tensor_parallel_size=2)
    with refused(ValueError, "mesh", fix="Leave --strategy out"):
        plan_fit(trainer(devices=1), _Layers(), _rows(), devices=8, mesh="auto", strategy="ddp")


def test_a_mesh_keeps_the_other_arguments_of_the_strategy() -> None:
    own = MeshStrategy(cpu_offload=True, plan=_PLAN)
    found = plan_fit(trainer(devices=1), _Layers(), _rows(), devices=8, strategy=own, mesh=(1, 4, 2)).measured
    assert found.cpu_offload
    # Half of the rows of the first layer and of the columns of the second one, in four shards.
    assert found.shards["net.0.weight"] == (256 // 2 // 4, 64)
    assert found.shards["net.2.weight"] == (64 // 4, 256 // 2)
    assert line_of(MeshSizes(1, 4, 2), own) == "MeshStrategy(shard=4, tensor=2, plan=...)"
    assert line_of(MeshSizes(2, 4, 1), own) == "MeshStrategy(replicate=2, shard=4)"
    assert line_of(MeshSizes(1, 8, 1), "fsdp_cpu_offload") == "MeshStrategy(shard=8, cpu_offload=True)"


def test_tp_is_short_for_a_mesh() -> None:
    assert chosen_mesh(None, 2, None) == (1, "auto", 2)
    assert chosen_mesh((2, 4, 1), None, "fsdp") == (2, 4, 1)
    own = MeshStrategy(plan=_PLAN)
    found = plan_fit(trainer(devices=1), _Layers(), _rows(), devices=8, strategy=own, tensor_parallel_size=2).measured
    assert found.mesh == {"replicate": 1, "shard": 4, "tensor": 2}


def test_sizes_have_names() -> None:
    own = MeshStrategy(plan=_PLAN, micro_batches=4, pipeline=2)
    named = {"tensor": 2, "pipeline": 2}
    assert sizes_of(named, 16, 2) == sizes_of((1, "auto", 2, 2), 16, 2) == MeshSizes(1, 4, 2, 1, 2)
    assert line_of(MeshSizes(1, 4, 2, 1, 2), own).endswith("pipeline=2, plan=..., schedule='1F1B', micro_batches=4)")
    assert processes_of({"shard": 2, "context": 4, "expert": 8}) == 8
    assert processes_of({"context": 4}) is processes_of(None) is processes_of("auto") is None
    with refused(ValueError, "mesh", fix="expert", says="experts"):
        sizes_of({"experts": 4}, 16, 2)
    with refused(ValueError, "expert", says="auto"):
        sizes_of({"expert": "auto"}, 16, 2)
    with refused(ValueError, "mesh", fix="--mesh shard=2,context=8", says="shard=4,context=8"):
        sizes_of({"shard": 4, "context": 8}, 16, 2)


# -- experts


def test_fewer_experts_than_devices_are_sharded_by_their_features() -> None:
    found = plan_fit(trainer(devices=1), Mixture(), loader(), devices=8, mesh={}).measured
    assert found.shards["experts.up"] == (4, 2 * 96 // 8, 96)
    assert found.shards["experts.down"] == (4, 96 // 8, 2 * 96)
    # The router has fewer rows than there are devices, and two of them have one.
    assert found.shards["router.weight"] == (1, 96)


def test_experts_are_planned_with_equal_shares() -> None:
    plan = plan_fit(trainer(devices=1), Mixture(), loader(), devices=16, num_nodes=2, mesh={"expert": 4})
    found = plan.measured
    # One of four experts, whose rows are divided over the groups of four.
    assert found.shards["experts.up"] == (1, 2 * 96 // 4, 96)
    # The tokens of six rows and their results, and the gradients of both; before, the numbers of tokens.
    numbers, tokens = 4 * (1 + 1) * 8, 2 * 6 * 40 * 96 * 4
    assert found.sent["all-to-all"][:2] == (5, numbers + 4 * tokens)
    assert found.links["all-to-all"] == ((3 * (numbers // 4) + 3 * tokens, 0),)
    assert "as many tokens as the others" in plan.table()


def test_what_experts_do_not_go_with_is_refused() -> None:
    def plan(mesh: dict[str, int]) -> None:
        plan_fit(trainer(devices=1), Mixture(), loader(), devices=8, mesh=mesh)

    with refused(ValueError, "expert", fix="Leave pipeline out, or expert"):
        plan({"pipeline": 2, "expert": 2})
    with refused(ValueError, "expert", fix="divisor of 8"):
        plan({"expert": 3})
    with refused(ValueError, "expert", says="Transformer has no experts"):
        plan_fit(trainer(devices=1), Transformer(), loader(), devices=8, mesh={"expert": 2})


# -- the best mesh


def test_meshes_of_many_machines() -> None:
    meshes = candidates(1024, 128)
    assert [(some[0].tensor, some[0].pipeline) for some in meshes] == [
        *((1, 1), (2, 1), (4, 1), (8, 1)),
        *((tensor, stages) for stages in (2, 4, 8, 16) for tensor in (1, 8)),
    ]
    # First without copies, then with the most.
    assert meshes[0][:3] == [MeshSizes(1, 1024, 1), MeshSizes(1024, 1, 1), MeshSizes(128, 8, 1)]
    assert MeshSizes(2, 64, 8) in meshes[3]
    found = [one for some in (*meshes, *with_experts(1024, 128, 64)) for one in some]
    assert all(one.processes == 1024 for one in found)
    assert len(set(found)) == len(found)
    assert candidates(6, 1)[2] == [MeshSizes(1, 2, 3), MeshSizes(2, 1, 3)]
    assert [some[0].expert for some in with_experts(1024, 128, 64)] == [64, 8, 4, 2]


def test_the_mesh_with_the_most_copies_that_fit_is_planned_third() -> None:
    reasons: dict[MeshSizes, str] = {}
    found: dict[MeshSizes, Measured] = {}
    asked = to_plan(1024, 128, 60e9, found, reasons, lambda one: "too slow" if one.pipeline > 1 else "")
    first, split = next(asked), next(asked)
    assert (first, split) == (MeshSizes(1, 1024, 1), MeshSizes(1, 128, 8))
    # 20 GB, of which 1 GB are shards: 1/16 of the shards take 16 GB more.
    measured = plan_fit(trainer(devices=1), _Layers(), _rows(), devices=8, strategy="fsdp2").measured
    parts = {"weights": 10**9, "activations": 19 * 10**9}
    found[first] = replace(measured, peak=20 * 10**9, peak_parts=parts, mesh={"shard": 1024})
    assert next(asked) == MeshSizes(32, 32, 1)
    assert MeshSizes(64, 16, 1) in reasons
    # Layers cannot be split over eight, and stages need more time.
    reasons[split] = "no plan"
    assert [next(asked).tensor for _ in range(2)] == [2, 4]
    # It has experts.
    found[first] = replace(found[first], experts=8)
    assert [next(asked).expert for _ in range(3)] == [8, 4, 2]
    assert {(one.tensor, one.expert, one.pipeline) for one in asked} == {
        *((tensor, 1, 1) for tensor in (1, 2, 4)), *((1, expert, 1) for expert in (2, 4, 8)),
    }  # fmt: skip
    assert reasons[MeshSizes(2, 64, 8)] == "no plan"
    assert reasons[MeshSizes(1, 512, 1, 1, 2)] == "too slow"


# TFLOP/s with which no pipeline is worth its idle time.
_SLOW = 1e-6


@pytest.fixture(scope="module")
def best() -> FitPlan:
    """Meshes of four devices of two machines, of which a device does not hold all parameters."""
    whole = plan_fit(trainer(devices=1), _Layers(), _rows(), devices=4, num_nodes=2, mesh=(4, 1, 1)).measured
    return plan_fit(
        trainer(devices=1), _Layers(), _rows(), devices=4, num_nodes=2, strategy=MeshStrategy(plan=_PLAN), mesh="auto",
        memory_bytes=int(whole.peak / 0.9) - 1000, budget_seconds=600, tflops=_SLOW,
    )  # fmt: skip


def test_the_best_mesh_fits_and_exchanges_least(best: FitPlan) -> None:
    assert best.fits is True
    first = best.meshes[0]
    assert first.measured == best.measured
    assert len(best.meshes) == sum(map(len, candidates(4, 2)))
    fitting = [one for one in best.meshes if one.measured is not None and one.measured.fits(best.memory)]
    assert [one.seconds_for_all for one in fitting] == sorted(one.seconds_for_all for one in fitting)
    assert list(best.meshes[: len(fitting)]) == fitting
    whole = next(one for one in best.meshes if (one.replicate, one.shard) == (4, 1))
    assert whole not in fitting
    split = next(one for one in best.meshes if (one.replicate, one.shard, one.tensor) == (1, 2, 2))
    assert split.line == "MeshStrategy(shard=2, tensor=2, plan=...)"
    assert split.measured is not None


def test_the_table_of_meshes(best: FitPlan) -> None:
    text = best.table()
    assert f"strategy={best.meshes[0].line}\n" in text
    assert "450 GB/s within a machine and 50 GB/s between machines,\nand computes 1e-06 TFLOP/s." in text
    assert Speeds().text().endswith("400 TFLOP/s (NVLink, InfiniBand and 40% of the peak of an H100).\n" + _NOT_COUNTED)
    assert "20% idle costs more than others exchange." in text
    assert "for 4 batches" in text
    content = json.loads(best.to_json())
    assert content["bandwidth"] == {"within": 450.0, "between": 50.0, "tflops": _SLOW}
    assert content["meshes"][0]["seconds"] == content["seconds"]


def test_memory_on_fewer_shards_is_expected_from_a_plan(best: FitPlan) -> None:
    found = {(one.replicate, one.shard, one.tensor): one.measured for one in best.meshes if one.measured}
    expected = expected_memory(found[1, 4, 1], MeshSizes(2, 2, 1))
    assert expected == pytest.approx(found[2, 2, 1].peak, rel=0.05)


def test_layers_that_cannot_be_split_have_the_reason() -> None:
    plan = plan_fit(trainer(devices=1), _Layers(), _rows(), devices=4, num_nodes=2, mesh="auto", tflops=_SLOW)
    assert plan.measured.tensor_parallel == 1
    reasons = {one.reason for one in plan.meshes if one.tensor == 2 and one.pipeline == 1}
    assert len(reasons) == 1
    assert "has no plan" in reasons.pop()
    assert "meshes are not planned, such as" in plan.table()


def test_no_mesh_is_begun_after_the_time() -> None:
    own = MeshStrategy(plan=_PLAN)
    plan = plan_fit(trainer(devices=1), _Layers(), _rows(), devices=64, strategy=own, mesh="auto", budget_seconds=0.001)
    assert plan.meshes[0].measured is not None
    late = [one for one in plan.meshes if one.measured is None]
    assert len(late) > 10
    assert {one.reason for one in late} == {"the time is over (--budget)"}


class _Wide(_Layers):
    """Two blocks whose activations are much larger than their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Tanh()) for _ in range(2)))


def test_a_pipeline_is_proposed_where_no_other_mesh_fits() -> None:
    rows = DataLoader(torch.randn(8192, 64), batch_size=2048)  # type: ignore[arg-type]
    whole = plan_fit(trainer(devices=1), _Wide(), rows, devices=2, mesh=(2, 1, 1)).measured
    plan = plan_fit(
        trainer(devices=1), _Wide(), rows, devices=2, mesh="auto", memory_bytes=whole.peak // 2, tflops=_SLOW
    )
    assert plan.fits is True
    assert plan.meshes[0].line == "MeshStrategy(shard=1, pipeline=2)"
    assert [one.measured.fits(plan.memory) for one in plan.meshes if one.measured] == [True, False]
    # Four micro-batches, and what they compute while others wait.
    assert plan.measured.idle == 0.2
    assert plan.meshes[0].computing == plan.measured.flops / (_SLOW * 1e12) / 0.8
    assert "(20% idle)" in plan.table()


# -- models of many equal blocks


class _Block(nn.Module):
    def __init__(self, in_pair: bool) -> None:
        super().__init__()
        self.in_pair = in_pair
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Any:
        result = x + self.down(self.up(x).relu())
        return (result, None) if self.in_pair else result


class _Blocks(L.LightningModule):
    """Ten blocks between two layers."""

    def __init__(self, *, in_pairs: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 4096)
        self.blocks = nn.ModuleList(_Block(in_pairs) for _ in range(10))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.first(batch)
        for block in self.blocks:
            x = block(x)
            x = x[0] if isinstance(x, tuple) else x
        loss: Tensor = self.last(x).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9)


def test_a_plan_of_many_blocks_is_estimated_from_a_few() -> None:
    own = MeshStrategy(plan={"blocks.*.up": "colwise", "blocks.*.down": "rowwise"})

    def planned(**options: Any) -> FitPlan:
        return plan_fit(trainer(devices=1, memory="full"), _Blocks(), _rows(), devices=2, strategy=own, **options)

    found = planned(mesh="auto", budget_seconds=600, tflops=_SLOW)
    assert found.measured.blocks == 0
    assert "the others with at most 6 of the 10 blocks" in found.table()
    for one in found.meshes[1:]:
        if one.pipeline > 1:
            continue
        assert one.measured is not None
        assert (one.measured.kept, one.measured.blocks) == (6, 10)
        whole = planned(mesh=(one.replicate, one.shard, one.tensor)).measured
        for name in ("parameters", "local_elements", "weights", "gradients", "optimizer", "sent", "links"):
            assert getattr(one.measured, name) == getattr(whole, name), name
        assert one.measured.peak == pytest.approx(whole.peak, rel=0.02)


def test_blocks_that_cannot_be_left_out_are_all_planned() -> None:
    plan = plan_fit(
        trainer(devices=1), _Blocks(in_pairs=True), _rows(), devices=2, mesh="auto", budget_seconds=600, tflops=_SLOW
    )
    assert {one.measured.blocks for one in plan.meshes if one.measured} == {0}


# -- the command


def test_the_command_plans_a_mesh_of_the_program(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "from tests.plan.on_two_processes import *\n"
        "import hasten as L\n"
        "L.Trainer(max_steps=2, strategy='ddp').fit(Transformer(), loader())\n",
        encoding="utf-8",
    )
    file = tmp_path / "plan.json"
    words = ("--mesh", "replicate=2,shard=4,tensor=2", "--json", file, program)
    ended = fork_python("-m", "hasten", "plan", *words, cwd=tmp_path)
    assert "Transformer on 16 devices of 2 machines\nstrategy 'mesh', layers split over 2" in ended.stdout, ended.stderr
    assert "replicate=2, shard=4, tensor=2" in ended.stdout
    assert json.loads(file.read_text(encoding="utf-8"))["measured"]["mesh"]["shard"] == 4


def test_the_command_wants_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    assert make_parser().parse(["--mesh", "2,auto,2", "program.py"]).mesh == (2, "auto", 2)
    for options, said in (
        *((("--mesh", text), "write sizes such as") for text in ("2,4,x", "shard=2,4", "shard=2,shard=4", "shard=")),
        (("--bandwidth", "450"), "write GB/s"),
    ):
        with pytest.raises(SystemExit) as ended:
            make_parser().parse([*options, "program.py"])
        assert ended.value.code == 2
        assert said in capsys.readouterr().err

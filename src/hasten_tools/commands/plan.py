"""``hasten plan``: estimate what a program needs on many devices, without using any."""

from __future__ import annotations

import re
import sys
from argparse import ArgumentTypeError
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from hasten.commands.parser import Option, Parser, new_file, positive, whole
from hasten_lightning.commands import run

if TYPE_CHECKING:
    from hasten_tools.plan.meshes import Mesh
    from hasten_tools.plan.report import Speeds


def main(arguments: Sequence[str]) -> int:
    """Plan a program; return the exit code."""
    parser = make_parser()
    given, rest = run.parse_program(parser, arguments)
    words = run.program_words(parser, given, rest)

    from hasten_tools.plan.planner import PlanError
    from hasten_tools.plan.program import Question, plan_program

    question = Question(
        devices=given.devices, nodes=given.nodes, strategy=given.strategy, tensor_parallel=given.tp,
        precision=given.precision, memory=given.memory, accelerator=given.accelerator, budget_seconds=given.budget,
        mesh=given.mesh, speeds=_speeds(given.bandwidth, given.tflops),
    )  # fmt: skip
    try:
        found = plan_program(question, lambda: run.main(words, as_python_does=True))
        print(found.table())
        if given.json is not None:
            given.json.write_text(found.to_json() + "\n", encoding="utf-8")
            print(given.json)
    except (PlanError, ValueError, TypeError, OSError) as error:
        print(f"hasten plan: {error}", file=sys.stderr)
        return 1
    return 0


def _size(text: str) -> int:
    from hasten_tools.plan.report import parse_size

    try:
        return parse_size(text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None


def _mesh(text: str) -> Mesh:
    if text == "auto":
        return "auto"
    words = [word.rpartition("=") for word in text.split(",")]
    names = [axis for axis, _, _ in words if axis]
    size = r"(auto|[1-9]\d*)"
    if not re.fullmatch(rf"{size}(,{size})*|\w+={size}(,\w+={size})*", text) or len(set(names)) < len(names):
        example = "shard=64,tensor=8, or 2,64,8 for replicate, shard and tensor"
        raise ArgumentTypeError(f"{text!r}: write sizes such as {example}.")
    sizes: list[int | Literal["auto"]] = ["auto" if one == "auto" else int(one) for _, _, one in words]
    return dict(zip(names, sizes, strict=True)) if names else tuple(sizes)


def _bandwidth(text: str) -> Speeds:
    from hasten_tools.plan.report import parse_bandwidth

    try:
        return parse_bandwidth(text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None


def _speeds(bandwidth: Speeds | None, tflops: float | None) -> Speeds | None:
    from hasten_tools.plan.report import Speeds

    return bandwidth if tflops is None else replace(bandwidth or Speeds(), tflops=tflops)


_OPTIONS: list[Option] = [
    ("--devices", "N", whole(1), "the number of devices in all; default: those of the program, or 8 a machine"),
    ("--nodes", "N", whole(1), "the number of machines; default: the program's, or with --devices machines of 8"),
    ("--strategy", "NAME", str, "as for Trainer(strategy=...); default: that of the program"),
    (
        "--mesh",
        "SIZES",
        _mesh,
        "plan with a MeshStrategy: its sizes by name, as shard=64,tensor=8,expert=2, or R,S,T for replicate, shard and "
        "tensor; auto: find the fastest",
    ),
    ("--tp", "N", whole(1), "split layers over N processes: the same as --mesh 1,auto,N"),
    ("--precision", "NAME", str, "as for Trainer(precision=...); default: that of the program"),
    ("--memory", "SIZE", _size, "of a device, such as 80GB: says whether it fits, and which change would make it fit"),
    ("--accelerator", "", ("gpu", "cpu"), "the devices to plan for; default: gpu"),
    ("--budget", "S", positive, "seconds for planning changes or meshes; none is begun after them; default: 45"),
    (
        "--bandwidth",
        "WITHIN,BETWEEN",
        _bandwidth,
        "GB/s of a device within and between machines, to estimate seconds; with --mesh auto 450,50 by default",
    ),
    ("--tflops", "T", positive, "TFLOP/s of a device in training, to estimate seconds; with --mesh auto 400"),
    ("--json", "FILE", new_file, "write everything found"),
]


def make_parser() -> Parser:
    """Return what reads the arguments of this command."""
    parser = Parser(
        prog="hasten plan",
        description=(
            "Print what a program would hold and send on each of many devices: its Trainer.fit runs to its second step "
            "on tensors without data, as the first process of a group that does not exist. The first batch of its "
            "training data is read. Everything after PROGRAM belongs to the program."
        ),
    )
    parser.add_options(_OPTIONS)
    parser.set_defaults(accelerator="gpu", budget=45.0)
    run.add_program(parser)
    return parser

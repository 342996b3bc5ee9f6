"""Measure what a reader of the package must hold: questions asked in many places, wide interfaces, branched functions.

    python scripts/crossings.py                 this checkout
    python scripts/crossings.py ../before .     two checkouts side by side
    python scripts/crossings.py --list complex  where the counted places are

Everything is read from the source with ``ast``. ``tests/rules/test_crossings.py`` has a limit for each measure, and the
limits may only fall. The names of the measures are the keys of ``MEASURES``.
"""

from __future__ import annotations

import argparse
import ast
import functools
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from reading import WALKS as WALKS
from reading import documented as documented
from reading import files_to_read
from structure import ROOT, Source, code_lines, named_parameters, read_sources

# Facts of a strategy. A fact that is asked in many places is a method that is missing.
CAPABILITIES = {
    "owns_step",
    "shares_batches",
    "saves_folders",
    "holds_gradients",
    "computes_alone",
    "steps_in_backward",
    "syncs_gradients",
    "exchanges",
}
# Those that a strategy changes when it divides parameters; the others belong to engines that step by themselves.
_OF_SHARDING = CAPABILITIES - {"owns_step", "holds_gradients"}
# What a program is made of, instead of what it does.
_INTROSPECTION = {
    "__module__",
    "co_names",
    "co_filename",
    "co_code",
    "f_back",
    "f_code",
    "_getframe",
    "get_instructions",
}
_KERNEL = {"loops", "module", "trainer", ""}
# Roots beside the core that have strategies of their own, which may ask for facts of strategies.
_STRATEGIES_TOO = {"hasten_deepspeed", "hasten_lightning", "hasten_xla"}

Places = list[str]


def _place(source: Source, node: ast.AST) -> str:
    return f"{source.path.as_posix()}:{getattr(node, 'lineno', 0)}"


def _last_name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _compared(source: Source) -> Iterator[tuple[ast.Compare, ast.expr]]:
    for node in source.nodes:
        if isinstance(node, ast.Compare):
            for side in (node.left, *node.comparators):
                yield node, side


def capability_questions(sources: list[Source]) -> Places:
    """Facts of strategies that other rooms ask for, and ``is_sharded``."""
    found = []
    for source in sources:
        if source.room == "strategies" or source.root in _STRATEGIES_TOO:
            continue
        for node in source.nodes:
            found += _asked(source, node, CAPABILITIES)
    return found


def _asked(source: Source, node: ast.AST, facts: set[str]) -> Places:
    is_fact = isinstance(node, ast.Attribute) and node.attr in facts and isinstance(node.ctx, ast.Load)
    is_call = isinstance(node, ast.Call) and _last_name(node.func) == "is_sharded"
    return [_place(source, node)] if is_fact or is_call else []


def world_size_questions(sources: list[Source]) -> Places:
    """Comparisons of a number of processes."""
    names = {"world_size", "_world_size"}
    return [_place(source, node) for source in sources for node, side in _compared(source) if _last_name(side) in names]


def device_questions(sources: list[Source]) -> Places:
    """Comparisons of the kind of a device: ``device.type == "cuda"``."""
    return [
        _place(source, node)
        for source in sources
        for node, side in _compared(source)
        if isinstance(side, ast.Attribute) and side.attr == "type" and "device" in ast.unparse(side.value)
    ]


def introspection(sources: list[Source]) -> Places:
    """Looks at modules of classes, bytecode and frames."""
    found = set()
    for source in sources:
        for node in source.nodes:
            if isinstance(node, ast.Attribute) and node.attr in _INTROSPECTION:
                found.add(_place(source, node))
    return sorted(found)


def _members(sources: list[Source], path: str, name: str) -> Places:
    source = next(one for one in sources if one.path.as_posix() == path)
    kind = next(node for node in source.tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    found: dict[str, str] = {}
    for node in kind.body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = _place(source, node)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = _place(source, node)
        elif isinstance(node, ast.Assign):
            found |= {target.id: _place(source, node) for target in node.targets if isinstance(target, ast.Name)}
    return [f"{place} {member}" for member, place in found.items() if not member.startswith("_")]


def strategy_members(sources: list[Source]) -> Places:
    """Public methods, properties and attributes of ``Strategy``."""
    return _members(sources, "strategies/base.py", "Strategy")


def run_fields(sources: list[Source]) -> Places:
    """Fields, properties and methods of ``Run``."""
    return _members(sources, "loops/run.py", "Run")


_BRANCHES = (ast.If, ast.For, ast.While, ast.ExceptHandler, ast.IfExp, ast.comprehension, ast.Assert, ast.match_case)


def complexity(function: ast.AST) -> int:
    """Return McCabe's number: 1, and 1 for each branch and for each further operand of ``and`` and ``or``.

    Functions inside count for themselves.
    """
    total, waiting = 1, list(ast.iter_child_nodes(function))
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            continue
        total += isinstance(node, _BRANCHES)
        if isinstance(node, ast.BoolOp):
            total += len(node.values) - 1
        waiting.extend(ast.iter_child_nodes(node))
    return total


@functools.cache
def _complexities(source: Source) -> list[tuple[int, str]]:
    return [
        (complexity(node), f"{_place(source, node)} {node.name}")
        for node in source.nodes
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def _functions_above(sources: list[Source], most: int) -> Places:
    found = [each for source in sources for each in _complexities(source)]
    return [f"{place}: {number}" for number, place in sorted(found, reverse=True) if number > most]


def complex_functions(sources: list[Source]) -> Places:
    """Functions with a complexity above 15."""
    return _functions_above(sources, 15)


def very_complex_functions(sources: list[Source]) -> Places:
    """Functions with a complexity above 25."""
    return _functions_above(sources, 25)


def batch_loop_ifs(sources: list[Source]) -> Places:
    """``if``, ``and`` and ``or`` in the loop over batches, nothing else of its function."""
    source = next(one for one in sources if one.path.as_posix() == "loops/fit.py")
    function = next(node for node in source.tree.body if getattr(node, "name", "") == "train_batches")
    loop = next(node for node in ast.walk(function) if isinstance(node, ast.While | ast.For))
    return [_place(source, node) for node in ast.walk(loop) if isinstance(node, ast.If | ast.IfExp | ast.BoolOp)]


def type_ignores(sources: list[Source]) -> Places:
    """Lines on which mypy is told to look away."""
    return [
        f"{source.path.as_posix()}:{number}"
        for source in sources
        for number, line in enumerate(source.text.splitlines(), 1)
        if re.search(r"#.*type: ignore", line)
    ]


def untyped_parameters(sources: list[Source]) -> Places:
    """Parameters of public functions that are ``Any``, ``object`` or not annotated; not ``*args`` and ``**kwargs``."""
    places = []
    for source in filter(lambda each: each.is_public, sources):
        for path, parameter in named_parameters(source):
            if parameter.annotation is None or ast.unparse(parameter.annotation) in ("Any", "object"):
                places.append(f"{_place(source, parameter)} {path}({parameter.arg})")
    return places


def read_for_a_batch(sources: list[Source]) -> Places:
    """Files that a reader opens for a training batch; see ``scripts/reading.py``."""
    return sorted(files_to_read(sources, "batch"))


def read_for_a_save(sources: list[Source]) -> Places:
    """Files that a reader opens for a checkpoint that is saved."""
    return sorted(files_to_read(sources, "save"))


def read_for_sharding(sources: list[Source]) -> Places:
    """Files of the core that do something else where a strategy divides parameters; helpers in ``_lib`` left out."""
    return sorted({
        place.partition(":")[0]
        for source in sources
        if source.root == "hasten" and source.room not in ("strategies", "_lib")
        for node in source.nodes
        for place in _asked(source, node, _OF_SHARDING)
    })  # fmt: skip


MEASURES: dict[str, Callable[[list[Source]], Places]] = {
    "capabilities": capability_questions,
    "world_size": world_size_questions,
    "device": device_questions,
    "introspection": introspection,
    "Strategy": strategy_members,
    "Run": run_fields,
    "batch loop": batch_loop_ifs,
    "complex": complex_functions,
    "very complex": very_complex_functions,
    "type: ignore": type_ignores,
    "any value": untyped_parameters,
    "read: batch": read_for_a_batch,
    "read: save": read_for_a_save,
    "read: sharding": read_for_sharding,
}


def sizes(sources: list[Source]) -> dict[str, int]:
    """Return the code lines of the kernel, and all code lines and lines."""
    kernel = [source for source in sources if source.room in _KERNEL]
    core = [source for source in sources if source.root == "hasten"]
    return {
        "kernel, code lines": sum(map(code_lines, kernel)),
        "core, code lines": sum(map(code_lines, core)),
        "core, lines": sum(source.lines for source in core),
        "all, code lines": sum(map(code_lines, sources)),
        "all, lines": sum(source.lines for source in sources),
    }


def counts(root: Path = ROOT) -> dict[str, int]:
    """Return each measure of a checkout as a number."""
    sources = read_sources(root)
    parameters = sum(len(list(named_parameters(source))) for source in sources if source.is_public)
    return (
        {name: len(measure(sources)) for name, measure in MEASURES.items()}
        | {"public parameters": parameters}
        | sizes(sources)
    )


def main() -> None:
    """Print the measures of one or several checkouts, or the places behind one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("roots", nargs="*", type=Path, default=[ROOT], help="checkouts (default: this one)")
    parser.add_argument("--list", choices=list(MEASURES), help="the places behind a measure")
    options = parser.parse_args()
    if options.list:
        print("\n".join(MEASURES[options.list](read_sources(options.roots[-1]))))
        return
    found = [counts(root.resolve()) for root in options.roots]
    for name in found[0]:
        print(f"{name:20}" + "".join(f"{column[name]:>10,}" for column in found))


if __name__ == "__main__":
    main()

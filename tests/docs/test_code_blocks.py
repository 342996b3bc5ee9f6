"""Every code block of the documentation runs, or is compiled and says why it cannot run here."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import inspect
import io
import re
import runpy
import shlex
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import hasten as L
from hasten.commands import commands
from hasten_lightning.commands.run import parse_program
from tests.docs.blocks import ELSEWHERE, LANGUAGES, ROOT, Block, blocks_in, blocks_of, commands_of, pages

PAGES = {page: blocks_of(page) for page in pages()}
# They name arguments that are refused.
ABOUT_ERRORS = {"docs/errors.md", "docs/tpu.md"}
RUN_HERE = [
    page
    for page, blocks in PAGES.items()
    if any(
        block.language in ("sh", "console") or (block.language == "python" and page not in ELSEWHERE)
        for block in blocks
    )
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder to run in, where modules that a page writes can be imported; one thread, and no seed left."""
    import torch

    from hasten_tools.speed import levers

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    threads, modules, main = torch.get_num_threads(), set(sys.modules), sys.modules["__main__"]
    torch.set_num_threads(1)
    registered = {lever.name for lever in levers.known_levers()}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield tmp_path
    for lever in levers.known_levers():
        if lever.name not in registered:
            levers.unregister(lever.name)
    if "hasten_lightning" in sys.modules:
        sys.modules["hasten_lightning"].uninstall()  # A program of Lightning ended with an error.
    torch.set_num_threads(threads)
    torch.set_default_dtype(torch.float32)
    sys.modules["__main__"] = main
    for name in set(sys.modules) - modules:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def execute(code: str, block: Block, names: dict[str, Any], *, line: int) -> None:
    exec(compile("\n" * (line - 1) + code, block.page, "exec"), names)


def exit_code(call: Callable[[], object]) -> object:
    """Return the code that a call exits with, 0 if it returns."""
    try:
        call()
    except SystemExit as stopped:
        return stopped.code or 0
    return 0


def run_command(line: str) -> None:
    """Run a line of a ``sh`` block in this process."""
    words = shlex.split(line)
    with pytest.MonkeyPatch.context() as patch:
        while words and "=" in words[0]:
            name, _, value = words.pop(0).partition("=")
            patch.setenv(name, value)
        if words[0] == "hasten":
            from hasten.commands import main

            assert main(words[1:]) == 0, line
        else:
            assert words[0] == "python", f"{line}: only python and hasten are run"
            patch.setattr(sys, "argv", words[1:])
            assert exit_code(lambda: runpy.run_path(words[1], run_name="__main__")) == 0, line


def check_command(line: str) -> None:
    """Check the command and the options of a ``hasten`` line; other programs are none of ours."""
    words = shlex.split(line)
    while words and "=" in words[0]:
        words.pop(0)
    if not words or words[0] != "hasten" or len(words) == 1 or words[1].startswith("-"):
        return
    assert words[1] in commands(), line
    module = importlib.import_module(commands()[words[1]].module)
    parser = module.make_parser()
    of_program = any(action.dest == "program" for action in parser._actions)
    read = functools.partial(parse_program, parser) if of_program else parser.parse
    out = io.StringIO()
    with contextlib.redirect_stderr(out), contextlib.redirect_stdout(out):
        code = exit_code(lambda: read(words[2:]))
    assert code == 0, f"{line}\n{out.getvalue()}"


def run_block(block: Block, names: dict[str, Any], run_by_name: set[str]) -> None:
    if block.not_run:
        if block.language == "python":
            compile(block.text, f"{block.page}:{block.line}", "exec")
        return
    if block.title and "/" not in block.title:
        Path(block.title).write_text(block.text, encoding="utf-8")
    if block.language in ("sh", "console"):
        for line in commands_of(block):
            (run_command if block.run else check_command)(line)
    if block.language != "python" or block.title in run_by_name or block.page in ELSEWHERE:
        return
    if block.first:
        execute(block.first, block, names, line=block.line)
    if block.raises is None:
        execute(block.text, block, names, line=block.line)
    else:
        name, message = block.raises
        with pytest.raises(Exception) as error:
            execute(block.text, block, names, line=block.line)
        assert name in [kind.__name__ for kind in type(error.value).__mro__], repr(error.value)
        assert message in str(error.value)


@pytest.mark.parametrize("page", RUN_HERE)
@pytest.mark.filterwarnings("ignore")
def test_the_blocks_of_a_page_run(page: str, folder: Path) -> None:
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main  # Where a checkpoint looks for classes of the program.
    commands = [line for block in PAGES[page] if block.run for line in commands_of(block)]
    run_by_name = {word for line in commands for word in shlex.split(line) if word.endswith(".py")}
    for block in PAGES[page]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run_block(block, main.__dict__, run_by_name)


def test_each_block_names_its_language() -> None:
    without = [
        f"{block.page}:{block.line}: {block.language or 'no language'}"
        for blocks in PAGES.values()
        for block in blocks
        if block.language not in LANGUAGES
    ]
    assert without == [], f"write one of {sorted(LANGUAGES)} after the fence; text is output"


def test_programs_side_by_side_are_narrow() -> None:
    wide = [
        f"{page}: {line}"
        for page, blocks in PAGES.items()
        for block in blocks
        if page.startswith("docs/start/") and block.language == "python"
        for line in block.text.splitlines()
        if len(line) > 70
    ]
    assert wide == [], "ruff format --isolated --line-length 66 docs/start/*.md"


def test_no_fence_is_missed() -> None:
    for page, blocks in PAGES.items():
        text = (ROOT / page).read_text(encoding="utf-8")
        assert text.count("```") >= 2 * len(blocks), page
        lines = [line for line in text.splitlines() if line.lstrip().startswith("```")]
        inside = sum(line.lstrip().startswith("```") for block in blocks for line in block.text.splitlines())
        assert len(lines) == 2 * len(blocks) + inside, (
            f"{page}: a fence is not closed, or not indented as it was opened"
        )


def calls_in(text: str) -> Iterator[ast.Call]:
    """Yield the calls in the inline code of a text."""
    for code in re.findall(r"`([^`\n]+\([^`\n]*\))`", text):
        try:
            tree = ast.parse(code.replace(r"\|", "|"), mode="eval")
        except SyntaxError:
            continue
        yield from (node for node in ast.walk(tree) if isinstance(node, ast.Call))


@pytest.mark.parametrize("page", PAGES)
def test_arguments_named_in_the_text_exist(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    known = {front.__name__: set(inspect.signature(front).parameters) for front in (L.Trainer, L.Fabric)}
    wrong = [
        ast.unparse(call)
        for call in calls_in(text)
        for name in [ast.unparse(call.func).removeprefix("L.")]
        if name in known and not {keyword.arg for keyword in call.keywords if keyword.arg} <= known[name]
    ]
    assert wrong == [] or page in ABOUT_ERRORS


def test_comments_above_blocks_are_understood() -> None:
    text = (
        "<!-- not run: needs 8 GPUs -->\n\n```python\na\n```\n\n"
        '<!-- run first:\nx = 1\n-->\n<!-- raises ValueError: no -->\n```python title="a.py"\nb\n```\n'
        '=== "Tab"\n\n    ```sh\n    hasten run \\\n      x.py  # why\n\n    $ ls\n    ```\n'
    )
    one, two, three = blocks_in(text, "page.md")
    assert (one.not_run, one.line, one.text) == ("needs 8 GPUs", 4, "a\n")
    assert (two.first, two.raises, two.title, two.not_run) == ("\nx = 1\n", ("ValueError", "no"), "a.py", "")
    assert commands_of(three) == ["hasten run x.py", "ls"]

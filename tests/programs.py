"""Run Python programs in processes of their own, with this checkout on their path."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.forked import STARTED_COPIES

ROOT = Path(__file__).parents[1]
# The variable with the name of the socket of a fork server, for the programs of ``copying_python``, and this one's.
_SERVER = "HASTEN_TESTS_FORK_SERVER"
_SERVER_NAME = f"hasten-tests-{os.getpid()}"


def run_python(
    *words: str | Path,
    cwd: Path | None = None,
    timeout: float = 600,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Run ``python WORDS...`` with one thread and return its exit code and output.

    Args:
        words: the arguments, for example a path, or "-c" and a program.
        cwd: the folder to run in.
        timeout: seconds after which the test fails: far more than a program takes, on a loaded machine too.
        environment: variables beside those of this process.

    """
    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=cwd,
        env=environment_of_python() | environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def fork_python(
    *words: str | Path, cwd: Path | None = None, timeout: float = 600, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run ``python WORDS...`` as ``run_python`` does, in a copy of a process that has imported torch.

    The program comes first of the words: a path, "-c" or "-m". Not for programs about what is imported when, or that
    are found by their command line; processes that the program starts are started as ever, except with those of
    ``started_copies`` among the variables.
    """
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        code = Forked(words, output.fileno(), errors.fileno(), cwd=cwd, **environment).wait(timeout)
        printed = []
        for file in (output, errors):
            file.seek(0)
            printed.append(file.read())
    return subprocess.CompletedProcess(words, code, *printed)


def run_imported(
    program: Path, *words: str | Path, cwd: Path, timeout: float = 600, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run ``python PROGRAM WORDS...`` as ``fork_python`` does, in a copy that has imported what tests do, hasten too.

    For programs of which most would be the import of hasten's optional packages, and that hasten does not run again.
    """
    import multiprocessing  # Takes a while, and others do not need it.

    output, errors = cwd / "output.txt", cwd / "errors.txt"
    variables = environment_of_python() | environment
    process = multiprocessing.get_context("forkserver").Process(
        target=_as_program, args=(program, [str(word) for word in words], cwd, variables, output, errors)
    )
    process.start()
    process.join(timeout)
    if process.exitcode is None:
        process.kill()
        raise TimeoutError(f"the program still ran after {timeout} seconds")
    return subprocess.CompletedProcess(words, process.exitcode, output.read_text(), errors.read_text())


def _as_program(
    program: Path, words: list[str], folder: Path, environment: dict[str, str], output: Path, errors: Path
) -> None:
    """Be the process of ``run_imported``."""
    import multiprocessing
    import runpy

    # As for any program; each worker of a DataLoader would import torch, from a server of its own.
    multiprocessing.set_start_method("fork", force=True)
    for number, path in ((1, output), (2, errors)):
        with path.open("w") as file:
            os.dup2(file.fileno(), number)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[:] = [str(program), *words]
    runpy.run_path(str(program), run_name="__main__")


class Forked:
    """A program in a copy of a process that has imported torch, see ``fork_python``.

    Args:
        words: after ``python``.
        output: the descriptor of the file for its output; None for a pipe, which is read from ``stdout``.
        errors: the same for its errors; None to put them where the output goes.
        stdin: the same for its input; None for none.
        cwd: the folder to run in.
        pass_fds: other files that it has, by the same numbers.
        new_session: whether it begins a session of its own, without this terminal.
        environment: variables beside those of this process.

    """

    def __init__(
        self, words: Sequence[str | Path], output: int | None = None, errors: int | None = None, *,
        stdin: int | None = None, cwd: Path | None = None, pass_fds: Sequence[int] = (), new_session: bool = False,
        **environment: str,
    ) -> None:  # fmt: skip
        variables = environment_of_python() | environment
        request = {
            "words": [str(word) for word in words],
            "folder": str(cwd or os.getcwd()),
            "environment": variables,
            "path": variables["PYTHONPATH"].split(os.pathsep),
            "files": [0, 1, 2, *pass_fds],
            "session": new_session,
        }
        self.returncode: int | None = None
        self._answers, answers = os.pipe()
        passed = [answers]
        if stdin is None:
            passed.append(stdin := os.open(os.devnull, os.O_RDONLY))
        if output is None:
            reads, output = os.pipe()
            passed.append(output)
            self.stdout = os.fdopen(reads)
        files = [answers, stdin, output, output if errors is None else errors, *pass_fds]
        with _connected() as server:
            socket.send_fds(server, [json.dumps(request).encode()], files)
        for descriptor in passed:
            os.close(descriptor)
        self.pid = self._next_answer()

    def _next_answer(self) -> int:
        text = b""
        while not text.endswith(b"\n"):
            part = os.read(self._answers, 1)
            assert part, "the process that is copied has ended"
            text += part
        return int(text)

    def _is_ready(self, timeout: float) -> bool:
        """Return whether it has ended, within so many seconds; ``select`` takes small descriptors only."""
        answer = select.poll()
        answer.register(self._answers, select.POLLIN)
        return bool(answer.poll(timeout * 1000))

    def send_signal(self, number: int) -> None:
        """Send it a signal if it runs."""
        if self.returncode is None and not self._is_ready(0):
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it if it runs."""
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float = 600) -> int:
        """Return the exit code; kill the program and raise if it takes longer."""
        if self.returncode is None:
            ready = self._is_ready(timeout)
            if not ready:
                self.kill()
            self.returncode = self._next_answer()
            os.close(self._answers)
            if not ready:
                raise TimeoutError(f"the program still ran after {timeout} seconds")
        return self.returncode

    def communicate(self, timeout: float = 600) -> tuple[str, None]:
        """Return what it printed, when it and all that write to its output have ended."""
        with self.stdout, _killed_after(timeout, self):
            printed = self.stdout.read()
        self.wait(timeout)
        return printed, None


@contextlib.contextmanager
def _killed_after(seconds: float, process: Forked) -> Iterator[None]:
    timer = threading.Timer(seconds, process.kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def copying_python(folder: Path) -> dict[str, str]:
    """Write a program that takes the place of ``python``; return variables with which launchers start it.

    It does as ``fork_python`` does, so that the processes are copies that torchrun or ``hasten launch`` start. They get
    signals, are killed and fail as ever.
    """
    program = folder / "python"
    program.write_text(
        f"#!{sys.executable} -S\nimport sys\nsys.path[0] = {str(ROOT)!r}\n"
        "from tests.programs import run_copy\nrun_copy(sys.argv[1:])\n"
    )
    program.chmod(0o755)
    return {"PYTHON_EXEC": str(program), _SERVER: share_fork_server()}


def started_copies(count: int) -> dict[str, str]:
    """Return variables with which so many of the Python processes that a program of ``fork_python`` starts are copies.

    For ranks that hasten starts, which know the process that started them, and for those of "spawn"; also for so many
    that each of these starts. They are children of the program, get signals, are killed and fail as ever.
    """
    return {STARTED_COPIES: str(count)}


def run_copy(words: list[str]) -> None:
    """Run ``python WORDS...`` in a copy, with the files and variables of this process; pass on signals, end as it."""
    process = Forked(words[words[0] == "-u" :], 1, 2, stdin=0, **os.environ)  # type: ignore[arg-type]
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, lambda number, _: process.send_signal(number))
    code = process.wait(timeout=3600)
    if code < 0:
        if code != -signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


def share_fork_server() -> str:
    """Return the name of the process whose copies run the programs; it starts if there is none, and then imports torch.

    Processes that this one starts use it, too.
    """
    if _SERVER not in os.environ:
        _fork_server()
        os.environ[_SERVER] = _SERVER_NAME
    return os.environ[_SERVER]


def _connected() -> socket.socket:
    """Return a socket to the fork server, for one program."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.connect(f"\0{share_fork_server()}")
    return server


@functools.cache
def _fork_server() -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start the fork server; return it with the socket whose end it waits for."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    others = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    others.bind(f"\0{_SERVER_NAME}")
    others.listen()
    with its, others:
        program = f"from tests import forked; exec(forked.serve({its.fileno()}, {others.fileno()}))"
        # It ends when this process does, which closes the socket.
        process = subprocess.Popen(
            [sys.executable, "-c", program],
            env=environment_of_python(),
            pass_fds=[its.fileno(), others.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
    return process, ours


def environment_of_python() -> dict[str, str]:
    """Return this process's variables with this checkout on the path, one thread, no ranks and no size of a terminal.

    Nor ``PYTHONUNBUFFERED``, with which the words that two processes print may land in one another's lines.
    """
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    dropped = ("LOCAL_RANK", "MASTER_PORT", "PYTHONUNBUFFERED", "COLUMNS", "LINES")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    return {**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def load_script(name: str) -> Any:
    """Import ``scripts/NAME.py``, which is in no package."""
    return _load(ROOT / "scripts" / f"{name}.py", f"scripts_{name}")


def call_in_file(path: str, name: str, *args: object, **kwargs: object) -> Any:
    """Import the file ``path``, whose functions cannot be pickled, and return what its function ``name`` returns."""
    import multiprocessing  # Takes a while, and others do not need it.

    if multiprocessing.get_start_method(allow_none=True) == "forkserver":
        # As this process was started; each worker of a DataLoader would import torch, from a server of its own.
        multiprocessing.set_start_method("fork", force=True)
    module = _load(Path(path), f"hasten_file_{zlib.crc32(path.encode())}")
    return getattr(module, name)(*args, **kwargs)


def _load(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # Where dataclasses look for it.
    spec.loader.exec_module(module)
    return module

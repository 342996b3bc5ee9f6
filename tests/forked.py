"""A process that has imported torch, and runs each program that it is sent in a copy of itself.

``fork_python`` of ``tests/programs.py`` starts it, and sends it programs: a start with torch and its compiler takes
three seconds, a copy some milliseconds. hasten is not imported before: it looks at the folder it is imported in.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import fcntl
import functools
import gc
import importlib
import json
import multiprocessing.process
import multiprocessing.util
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import warnings
from types import CodeType
from typing import Any

# The first optimizer of a process imports torch._dynamo, which takes longer than torch itself.
PRELOADED = ("torch", "torch._dynamo")
MOST_BYTES, MOST_FILES = 1 << 20, 16
# How many of the Python processes that a program starts, and each of them, are copies as well: see ``_Spares``.
STARTED_COPIES = "HASTEN_TESTS_STARTED_COPIES"


def serve(descriptor: int, listening: int) -> CodeType:
    """Start programs until a socket is closed; return the program to run, in each copy.

    Processes connect to the socket that listens, with one program each. torch is imported when the first has come.

    A message is JSON: "words" after ``python``, "folder", "environment" and "path", the folders of PYTHONPATH, whether
    it begins a "session", and the numbers that the "files" have for it, which come with the message. Before those comes
    one for the id of the copy, and its exit code when it has ended.
    """
    own = {os.path.abspath(folder) for folder in os.environ["PYTHONPATH"].split(os.pathsep)}
    sys.path[:] = [folder for folder in sys.path[1:] if folder not in own]  # The first is the folder of this program.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(fileno=descriptor) as whoever_started_it, socket.socket(fileno=listening) as others:
        waiting = select.poll()
        for each in (whoever_started_it, others):
            waiting.register(each, select.POLLIN)
        while True:
            if waiting.poll()[0][0] == whoever_started_it.fileno():
                raise SystemExit
            with others.accept()[0] as request:
                message, files, *_ = socket.recv_fds(request, MOST_BYTES, MOST_FILES)
            if not message:
                continue
            _preload()
            if not os.fork():
                break
            for file in files:
                os.close(file)
    answers, *files = files
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if child := os.fork():
        os.write(answers, f"{child}\n".encode())
        waiting = select.poll()
        waiting.register(os.pidfd_open(child), select.POLLIN)
        waiting.register(answers, 0)
        if any(state & select.POLLERR for _, state in waiting.poll()):
            os.kill(child, signal.SIGKILL)  # Whoever waits for it was killed itself.
        _, status = os.waitpid(child, 0)
        os.write(answers, f"{os.waitstatus_to_exitcode(status)}\n".encode())
        os._exit(0)
    os.close(answers)
    while True:
        request = json.loads(message)
        _prepare(files, request.pop("files"), request.pop("session"))
        # A copy that the program starts goes through the same lines.
        spares = _Spares()
        if (started := spares.make(int(request["environment"].get(STARTED_COPIES, "0")))) is None:
            spares.replace_programs()
            return _become(**request)
        message, files = started


@functools.cache
def _preload() -> None:
    for name in PRELOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    if "triton" in sys.modules:
        # As a process ends, triton 3.9 prints which of its objects nobody has collected.
        atexit.register(gc.unfreeze)


def copy_as_fork_server() -> None:
    """Have a copy of this process of pytest be the fork server that ``multiprocessing`` starts later.

    It has imported what the tests of all modules need, which a new process would import for 8 seconds.
    """
    spares = _Spares()
    with warnings.catch_warnings():
        # Newer versions of Python warn of threads, of which a process that runs tests has one that reads orders.
        warnings.simplefilter("ignore", DeprecationWarning)
        started = spares.make(1)
    if started is None:
        spares.replace_fork_server()
        return
    try:
        message, files = started
        request = json.loads(message)
        # pytest has its own, for this process only.
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # type: ignore[assignment]
        sys.unraisablehook, threading.excepthook = sys.__unraisablehook__, threading.__excepthook__
        faulthandler.disable()
        _leave_files(but=files)
        _prepare(files, request.pop("files"), request.pop("session"))
        exec(_become(**request), vars(sys.modules["__main__"]))
    finally:
        os._exit(1)


def _leave_files(but: list[int]) -> None:
    """Hold no file or pipe open for whoever waits for its end; the numbers stay taken, which objects still know."""
    null = os.open(os.devnull, os.O_RDWR)
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > 2 and number not in (null, *but):
            with contextlib.suppress(OSError):  # That of the folder which was read.
                os.fstat(number)
                os.dup2(null, number)


def _prepare(files: list[int], numbers: list[int], session: bool) -> None:
    """Give the files that a copy was sent the numbers that its program knows them by; begin a session."""
    # Above all numbers that they may have.
    above = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, 512) for file in files]
    for file in files:
        os.close(file)
    for file, number in zip(above, numbers, strict=True):
        os.dup2(file, number)
        os.close(file)
    if session:
        os.setsid()
    sys.stdout.reconfigure(line_buffering=sys.stdout.isatty())  # type: ignore[union-attr]


class _Spares:
    """Children of a copy that wait, as new as it is, until its program starts Python, and then are what it starts.

    So a program has real children, which know it as their parent, and whose exit codes it gets.
    """

    def __init__(self) -> None:
        self.waiting: list[tuple[int, socket.socket]] = []

    def make(self, count: int) -> tuple[bytes, list[int]] | None:
        """Return None in the copy itself, and in a child the message it gets; it ends if the copy does before."""
        for _ in range(count):
            ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            if child := os.fork():
                its.close()
                self.waiting.append((child, ours))
                continue
            for each in (ours, *(other for _, other in self.waiting)):
                each.close()
            with its:
                message, files, *_ = socket.recv_fds(its, MOST_BYTES, MOST_FILES)
            if not message:
                os._exit(0)
            return message, files
        return None

    def replace_fork_server(self) -> None:
        """Have ``multiprocessing`` take a child for its fork server."""
        spawn = multiprocessing.util.spawnv_passfds

        def spawn_copy(path: Any, args: Any, files: Any) -> int:
            takes = "multiprocessing.forkserver" in args[-1] and self._takes(args)
            return self._start(args, {file: file for file in files}) if takes else spawn(path, args, files)

        multiprocessing.util.spawnv_passfds = spawn_copy

    def replace_programs(self) -> None:
        """Have ``subprocess.Popen``, but for its pipes, and "spawn" take the children for a new Python."""
        if not self.waiting:
            return
        execute: Any = subprocess.Popen._execute_child  # type: ignore[attr-defined]
        spawn = multiprocessing.util.spawnv_passfds

        def execute_copy(process: Any, args: Any, executable: Any, *rest: Any) -> None:
            _, _, files, folder, environment, _, _, _, reads, in_, out, writes, errors_in, errors, *_, session, _ = rest
            has_pipe = {in_, out, errors_in} != {-1}
            if has_pipe or executable not in (None, args[0]) or not self._takes(args):
                execute(process, args, executable, *rest)
                return
            standard = {number: file for number, file in enumerate((reads, writes, errors)) if file != -1}
            given = standard | {number: number for number in files}
            process.pid = self._start(args, given, folder, environment, session)
            process._child_created = process._closed_child_pipe_fds = True
            if (null := getattr(process, "_devnull", None)) is not None:
                os.close(null)

        def spawn_copy(path: Any, args: Any, files: Any) -> int:
            # Not for the tracker of shared memory, which imports nothing.
            is_large = args[-1] == "--multiprocessing-fork" or "multiprocessing.forkserver" in args[-1]
            return (
                self._start(args, {file: file for file in files})
                if is_large and self._takes(args)
                else spawn(path, args, files)
            )

        subprocess.Popen._execute_child = execute_copy  # type: ignore[attr-defined]
        multiprocessing.util.spawnv_passfds = spawn_copy

    def _takes(self, args: Any) -> bool:
        if not self.waiting or not isinstance(args, list) or len(args) < 2 or os.fsdecode(args[0]) != sys.executable:
            return False
        first = _words(args)[0]
        return first in ("-c", "-m") or not first.startswith("-")

    def _start(
        self, args: Any, files: dict[int, int], folder: Any = None, environment: Any = None, session: bool = False
    ) -> int:
        child, ours = self.waiting.pop()
        variables = dict(os.environ if environment is None else environment)
        request = {
            "words": [str(word) for word in _words(args)],
            "folder": str(folder or os.getcwd()),
            "environment": variables,
            "path": [folder for folder in variables.get("PYTHONPATH", "").split(os.pathsep) if folder],
            "files": list(files),
            "session": session,
        }
        with ours:
            socket.send_fds(ours, [json.dumps(request).encode()], list(files.values()))
        return child


def _words(args: list[Any]) -> list[Any]:
    """Return what comes after Python and the option that PYTHONDONTWRITEBYTECODE stands for."""
    return args[1 + (args[1] == "-B") :]


def _become(words: list[str], folder: str, environment: dict[str, str], path: list[str]) -> CodeType:
    """Make this process the one that ``python WORDS...`` would be, except for what was imported; return its program."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    multiprocessing.process.ORIGINAL_DIR = folder  # Where "spawn" looks for the program.
    sys.executable = environment.get("PYTHON_EXEC", sys.executable)  # As torchrun has it.
    sys.orig_argv[1:] = words
    main: dict[str, Any] = vars(sys.modules["__main__"])
    for name in [name for name in main if not name.startswith("__")]:
        del main[name]
    if words[0] == "-m":
        sys.argv[:] = ["-m", *words[2:]]
        sys.path[:0] = [folder, *path]
        # Runs in the namespace of __main__, as Python itself does it.
        main["run"] = runpy._run_module_as_main  # type: ignore[attr-defined]
        return compile(f"run({words[1]!r})", "<module>", "exec")
    if words[0] == "-c":
        sys.argv[:] = ["-c", *words[2:]]
        sys.path[:0] = ["", *path]
        return compile(words[1], "<string>", "exec")
    sys.argv[:] = words
    sys.path[:0] = [os.path.dirname(os.path.realpath(words[0])), *path]
    main["__file__"] = words[0]
    with open(words[0], "rb") as program:
        return compile(program.read(), words[0], "exec")

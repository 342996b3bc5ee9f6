"""A process that has imported torch, and runs each program that it is sent in a copy of itself.

``fork_python`` of ``tests/programs.py`` starts it, and sends it programs: a start with torch and its compiler takes
three seconds, a copy some milliseconds. hasten is not imported before: it looks at the folder it is imported in.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import multiprocessing.process
import os
import runpy
import select
import signal
import socket
import sys
from types import CodeType
from typing import Any

# The first optimizer of a process imports torch._dynamo, which takes longer than torch itself.
PRELOADED = ("torch", "torch._dynamo")
MOST_BYTES = 1 << 20


def serve(descriptor: int, listening: int) -> CodeType:
    """Start programs as a socket says, until it is closed; return the program to run, in each copy.

    Other processes connect to the socket that listens, with one program each.

    A message is JSON: "words" after ``python``, "folder", "environment" and "path", the folders of PYTHONPATH. With it
    come four files: standard input, output and error, and one for the id of the copy, and its exit code when it has
    ended.
    """
    for name in PRELOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    own = {os.path.abspath(folder) for folder in os.environ["PYTHONPATH"].split(os.pathsep)}
    sys.path[:] = [folder for folder in sys.path[1:] if folder not in own]  # The first is the folder of this program.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(fileno=descriptor) as requests, socket.socket(fileno=listening) as others:
        waiting = select.poll()
        for each in (requests, others):
            waiting.register(each, select.POLLIN)
        while True:
            is_other = waiting.poll()[0][0] == others.fileno()
            with others.accept()[0] if is_other else contextlib.nullcontext(requests) as request:
                message, files, *_ = socket.recv_fds(request, MOST_BYTES, 4)
            if not message:
                if is_other:
                    continue
                raise SystemExit
            if not os.fork():
                break
            for file in files:
                os.close(file)
    *streams, answers = files
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
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdout.reconfigure(line_buffering=sys.stdout.isatty())  # type: ignore[union-attr]
    return _become(**json.loads(message))


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

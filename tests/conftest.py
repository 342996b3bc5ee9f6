"""What all tests share: small thread pools, and the marker that runs a test in several processes."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Before torch starts its threads: tests run beside each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A pool of processes that compile would import torch in each of them.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# Or else the first to compile with a new cache builds and loads a program only to see that the vectors of this machine
# work, for 5 seconds.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
# Before wandb is imported, by whichever test: it keeps the mode it started with. No test speaks to a server.
os.environ["WANDB_MODE"] = "offline"
os.environ.setdefault("WANDB_SILENT", "true")

# The fork server imports it once; each process is then a copy of it, made in milliseconds.
multiprocessing.set_forkserver_preload(["tests.preloaded"])

# Tests press Ctrl-C, in this process and in those it starts: also where a shell has started it in the background, with
# Ctrl-C ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Modules with long tests: one that is begun last would make all processes wait.
_BEGUN_FIRST = (
    "examples/test_engines.py", "story/test_other_world_size.py", "checkpoint/test_kills.py", "commands/test_launch.py",
    "strategies/test_fsdp_callbacks.py", "strategies/test_mesh.py", "strategies/test_fsdp.py",
    "checkpoint/test_sharded_runs.py", "compile/test_whole_step.py", "compile/test_with_others.py", "docs/test_site.py",
    "machine/test_launch.py", "story/test_endings.py", "story/test_two_processes.py",
)  # fmt: skip

_FOLDERS_OF_A_RUN = ("checkpoints", "lightning_logs")
_OF_A_RUN = (
    "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK",
    "PL_GLOBAL_SEED", "PL_SEED_WORKERS",  # seed_everything sets them.
    "MLFLOW_TRACKING_URI",  # mlflow.set_tracking_uri sets it.
)  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    """Give the compiler a folder that all processes share: the headers are compiled once in it, for 14 seconds."""
    if not hasattr(config, "workerinput") and "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        folder = tempfile.TemporaryDirectory(prefix="hasten-tests-compiled-", ignore_cleanup_errors=True)
        config.add_cleanup(folder.cleanup)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder.name
        config.add_cleanup(lambda: os.environ.pop("TORCHINDUCTOR_CACHE_DIR"))


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Start one fork server, which the test processes share, before they start."""
    if sys.platform == "linux" and session.config.getoption("numprocesses", None):
        from tests.programs import share_fork_server

        share_fork_server()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add what thousands of random combinations are asked for with."""
    parser.addoption("--combinations", type=int, default=60, help="how many random combinations to train (tests/story)")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse names of tests that contain an address, begin with long tests, and skip tests without their device."""
    changing = [item.nodeid for item in items if " at 0x" in item.nodeid]
    if changing:
        raise pytest.UsageError(f"give these tests ids that do not change: {changing[:3]}")
    for item in items:
        if item.get_closest_marker("tpu"):
            from hasten_xla.devices import finds_tpu

            if not finds_tpu():
                item.add_marker(pytest.mark.skip(reason="needs a TPU"))
    first = {name: place for place, name in enumerate(_BEGUN_FIRST)}
    folder = Path(__file__).parent
    items.sort(key=lambda item: first.get(os.path.relpath(item.path, folder), len(first)))
    for_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if for_gpu:
        import torch

        for item in for_gpu if not torch.cuda.is_available() else ():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Keep the garbage collector away from what was imported: its full passes would look through all of it."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> Iterator[object]:
    """In one of several test processes, make its fork server a copy of it, which has imported the tests already."""
    if sys.platform == "linux" and hasattr(session.config, "workerinput"):
        from tests.forked import copy_as_fork_server

        copy_as_fork_server()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    """Fail if tests have left files of a run in the checkout: those of the next session would find them."""
    yield
    left = [name for name in _FOLDERS_OF_A_RUN if (session.config.rootpath / name).exists()]
    if left and not hasattr(session.config, "workerinput"):
        print(f"\nA test has left {', '.join(left)} in the checkout. Have it write to tmp_path.")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(autouse=True, scope="module")
def _collector_sees_one_module() -> Iterator[None]:
    """Keep the garbage collector away from what the tests of a module have imported, as after the collection."""
    yield
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test marked ``world_size(n)`` in n processes that are in one process group on gloo.

    The function gets its fixtures and parameters, which must be such that they can be pickled (``tmp_path``). What it
    raises in any process fails the test.
    """
    marker = pyfuncitem.get_closest_marker("world_size")
    if marker is None:
        return None
    from hasten.resolve import runtime
    from hasten.strategies import DDPStrategy
    from tests.programs import call_in_file

    names = pyfuncitem._fixtureinfo.argnames

    def launch() -> None:
        runtime(accelerator="cpu", devices=marker.args[0], strategy=DDPStrategy(start_method="forkserver")).launch(
            call_in_file,
            str(pyfuncitem.path),
            pyfuncitem.originalname,
            **{name: pyfuncitem.funcargs[name] for name in names},
        )

    try:
        launch()
    except RuntimeError as error:
        # A thread of torch's gloo backend (pt_gloo_runloop) reads a null pointer in one of some thousand runs.
        if "was killed by SIGSEGV" not in str(error):
            raise
        warnings.warn(f"{pyfuncitem.nodeid} runs once more: {error}", stacklevel=1)
        launch()
    return True


@pytest.fixture(autouse=True)
def _no_traces_of_a_run(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Leave no process group, variable or logger setting of a run to the next test."""
    before = {name: os.environ.get(name) for name in _OF_A_RUN}
    logger = logging.getLogger("hasten")
    logger.setLevel(logging.INFO)
    logger.propagate = True
    yield
    from hasten._lib.rank_zero import rank_zero_only

    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    rank_zero_only.rank = 0  # type: ignore[attr-defined]
    import torch

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()

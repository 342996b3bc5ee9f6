"""What the fork server of the tests imports: most of what takes time in the processes that tests start as copies."""

from __future__ import annotations

import contextlib
import gc
import importlib
import pkgutil

import hasten

for _name in (
    "pytest",
    # The first optimizer of a process imports it, which takes longer than torch itself.
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "torchmetrics",
    "transformers.models.llama.modeling_llama",
    *(found.name for found in pkgutil.walk_packages(hasten.__path__, "hasten.")),
    "tests.fakes",
    "tests.models",
    "tests.refusals",
):
    # Where it is not installed, tests of it are skipped.
    with contextlib.suppress(ImportError):
        importlib.import_module(_name)

# Full passes in the copies would look through all of it, and copy its pages.
gc.collect()
gc.freeze()

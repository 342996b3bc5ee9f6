"""What a test needs that this machine does not have, for the marks of packages that test with Lightning's helper."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable

import torch
from packaging.version import Version

from hasten._lib import torch_private
from hasten.accelerators import MPSAccelerator, XLAAccelerator
from hasten.machine import devices
from hasten_lightning.utilities import imports


def runif_reasons(
    *,
    min_cuda_gpus: int = 0,
    min_torch: str | None = None,
    max_torch: str | None = None,
    min_python: str | None = None,
    bf16_cuda: bool = False,
    tpu: bool = False,
    mps: bool | None = None,
    skip_windows: bool = False,
    standalone: bool = False,
    deepspeed: bool = False,
    dynamo: bool = False,
    linux_only: bool = False,
    rich: bool = False,
    omegaconf: bool = False,
    psutil: bool = False,
    sklearn: bool = False,
    onnx: bool = False,
    onnxscript: bool = False,
    tensorrt: bool = False,
) -> tuple[list[str], dict[str, bool]]:
    """Return the reasons to skip a test, and the keywords for its mark.

    A test needs devices, versions, a system or packages. From ``max_torch`` on it cannot run; ``mps`` says whether it
    needs a GPU of Apple, or must not have one. ``standalone`` runs it alone in its process, where
    ``PL_RUN_STANDALONE_TESTS=1`` says so; ``dynamo`` says that it compiles.

    Example::

        >>> runif_reasons(min_python="99", standalone=True)[1]
        {'standalone': True}

    """
    # Without what follows the numbers: a nightly build counts as the version that it will be.
    installed = Version(Version(torch.__version__).base_version)
    # The reason, whether the test asks for it, and how to find out, which may import a package.
    needs: list[tuple[str, object, Callable[[], object]]] = [
        (f"GPUs>={min_cuda_gpus}", min_cuda_gpus, lambda: devices.num_cuda_devices() >= min_cuda_gpus),
        (f"torch>={min_torch}, {torch.__version__} installed", min_torch, lambda: installed >= Version(str(min_torch))),
        (f"torch<{max_torch}, {torch.__version__} installed", max_torch, lambda: installed < Version(str(max_torch))),
        (f"python>={min_python}", min_python, lambda: Version(platform.python_version()) >= Version(str(min_python))),
        ("CUDA device bf16", bf16_cuda, lambda: torch.cuda.is_available() and torch.cuda.is_bf16_supported()),
        ("unimplemented on Windows", skip_windows, lambda: sys.platform != "win32"),
        ("TPU", tpu, XLAAccelerator.is_available),
        ("MPS", mps is True, MPSAccelerator.is_available),
        ("not MPS", mps is False, lambda: not MPSAccelerator.is_available()),
        ("Standalone execution", standalone, lambda: os.environ.get("PL_RUN_STANDALONE_TESTS") == "1"),
        ("Deepspeed", deepspeed, lambda: imports._DEEPSPEED_AVAILABLE),
        ("torch.dynamo", dynamo, torch_private.compiler_is_supported),
        ("only linux", linux_only, lambda: sys.platform == "linux"),
        ("Rich", rich, lambda: imports._RICH_AVAILABLE),
        ("omegaconf", omegaconf, lambda: imports._OMEGACONF_AVAILABLE),
        ("psutil", psutil, lambda: imports._PSUTIL_AVAILABLE),
        ("scikit-learn", sklearn, lambda: imports._SKLEARN_AVAILABLE),
        ("onnx", onnx, lambda: imports._ONNX_AVAILABLE),
        ("onnxscript", onnxscript, lambda: imports._ONNXSCRIPT_AVAILABLE),
        ("torch-tensorrt", tensorrt, lambda: imports._TORCH_TRT_AVAILABLE),
    ]
    marks = {"min_cuda_gpus": bool(min_cuda_gpus), "tpu": tpu, "standalone": standalone}
    reasons = [reason for reason, is_needed, is_there in needs if is_needed and not is_there()]
    return reasons, {name: True for name, is_set in marks.items() if is_set}


__all__ = ["runif_reasons"]

"""Keep compiled code for the next run of the same program: in torch's own caches, in a folder that stays."""

from __future__ import annotations

import hashlib
import json
import os
import platform

import torch
from torch import nn

from hasten._lib import torch_private
from hasten._lib.device import is_cuda
from hasten._lib.files import cache_folder, write_atomically
from hasten.compile.settings import CompileSettings
from hasten.extend.origin import full_name

_TORCH_FOLDER = "TORCHINDUCTOR_CACHE_DIR"


def keep_torchs_cache() -> None:
    """Make torch keep its caches in ``compile/torch`` of ``hasten._lib.files.cache_folder``.

    Its default folder is in /tmp, which containers and reboots empty. A folder that the user chose is left alone. The
    caches contain code, so a folder that other users can write to is not used.
    """
    # torch sets the variable itself, to its default.
    default = torch_private.default_compile_cache()
    if os.environ.get(_TORCH_FOLDER, default) != default:
        return
    folder = cache_folder("compile") / "torch"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = folder.stat()
    except OSError:  # For example a read-only disk.
        return
    if not hasattr(os, "geteuid") or (status.st_uid == os.geteuid() and not status.st_mode & 0o022):
        os.environ[_TORCH_FOLDER] = str(folder)


class ColdSeconds:
    """The seconds that compiling one model took without a cache, by the number of graphs; empty if not known."""

    def __init__(self, module: nn.Module, settings: CompileSettings, device: torch.device, variant: str = "") -> None:
        on_gpu = is_cuda(device)
        kinds = ((name, type(part)) for name, part in module.named_modules())
        parts = [
            torch.__version__,
            platform.python_version(),
            platform.machine(),
            torch.cuda.get_device_name(device) if on_gpu else torch.backends.cpu.get_cpu_capability(),
            settings.recipe,
            variant,
            *(f"{name} {full_name(kind)}" for name, kind in kinds),
            *(f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in module.named_parameters()),
        ]
        key = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]
        self._path = cache_folder("compile") / f"{key}.json"
        self.by_graphs: dict[int, float] = {}

    def load(self) -> None:
        """Read the measurements of an earlier run, if there was one."""
        try:
            content = json.loads(self._path.read_text("utf-8"))
            self.by_graphs = {int(graphs): float(seconds) for graphs, seconds in content.items()}
        except (OSError, ValueError, AttributeError, TypeError):
            self.by_graphs = {}

    def save(self, seconds: dict[int, float]) -> None:
        """Write what this run measured; a full or read-only disk is ignored."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_atomically(self._path, json.dumps({**seconds, **self.by_graphs}).encode())
        except OSError:
            return

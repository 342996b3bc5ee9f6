"""Keep compiled code for the next run of the same program: torch's cache artifacts, one file per model.

Files are in the folder ``compile`` of ``hasten._lib.files``. Artifacts contain pickles, as torch's own cache folder
does, so a file is read only if it is complete and only this user can write to it and its folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hasten._lib.files import cache_folder, write_atomically
from hasten._lib.rank_zero import rank_zero_info
from hasten.compile.settings import CompileSettings

_MAGIC = b"hasten compile 1\n"
# torch's folder for what the artifacts do not contain: on the CPU, the machine code.
_TORCH_FOLDER = "TORCHINDUCTOR_CACHE_DIR"


def key_of(module: nn.Module, settings: CompileSettings, device: torch.device, variant: str = "") -> str:
    """Return a name for the compiled code of ``module``: equal for the same structure, options and machine.

    Args:
        module: the model.
        settings: how it is compiled.
        device: where it computes.
        variant: whatever else decides what is computed, such as the precision.

    """
    on_gpu = device.type == "cuda"
    kinds = ((name, type(part)) for name, part in module.named_modules())
    parts = [
        torch.__version__,
        platform.python_version(),
        platform.machine(),
        torch.cuda.get_device_name(device) if on_gpu else torch.backends.cpu.get_cpu_capability(),
        settings.recipe,
        variant,
        *(f"{name} {kind.__module__}.{kind.__qualname__}" for name, kind in kinds),
        *(f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in module.named_parameters()),
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]


class Artifacts:
    """The file of one model.

    Args:
        key: its name; see ``key_of``.

    """

    def __init__(self, key: str) -> None:
        self.path = cache_folder("compile") / f"{key}.bin"
        # Seconds that the run without a cache spent compiling, by the number of graphs; empty without a file.
        self.cold_seconds: dict[int, float] = {}

    def load(self) -> None:
        """Load the code that an earlier run compiled; a file that cannot be used is deleted with a one-line message."""
        self._keep_torchs_folder()
        try:
            meta, artifacts = _read(self.path)
            if meta.get("torch") != torch.__version__:
                raise ValueError(f"it was written by torch {meta.get('torch')}")
            try:
                loaded = torch.compiler.load_cache_artifacts(artifacts) is not None
            except Exception as error:  # A cache must never stop a run.
                raise ValueError(f"torch cannot read it ({type(error).__name__})") from None
            if not loaded:
                raise ValueError("torch cannot read it")
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            rank_zero_info(f"The compile cache {self.path} is not used: {error}. It will be written again.")
            with contextlib.suppress(OSError):
                self.path.unlink()
            return
        self.cold_seconds = {int(graphs): float(seconds) for graphs, seconds in meta["seconds"].items()}

    def save(self, seconds: dict[int, float]) -> None:
        """Write what torch has compiled in this process, whole or not at all.

        Args:
            seconds: spent compiling without a cache, by the number of graphs.

        """
        try:
            made = torch.compiler.save_cache_artifacts()
            if made is None:
                return
            artifacts, _ = made
            kept = {str(graphs): round(took, 3) for graphs, took in {**seconds, **self.cold_seconds}.items()}
            meta = json.dumps({"torch": torch.__version__, "seconds": kept}).encode() + b"\n"
            digest = hashlib.sha256(meta + artifacts).hexdigest().encode() + b"\n"
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_atomically(self.path, _MAGIC + digest + meta + artifacts)
        except Exception as error:  # For example a full or read-only disk.
            rank_zero_info(f"The compile cache was not written to {self.path} ({error}). The run is not affected.")

    def _keep_torchs_folder(self) -> None:
        # torch's own default lies in /tmp, which containers and reboots empty.
        from torch._inductor.runtime.cache_dir_utils import default_cache_dir

        # torch sets the variable itself, to its default.
        if os.environ.get(_TORCH_FOLDER, default_cache_dir()) != default_cache_dir():
            return
        folder = self.path.parent / "torch"
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            _check_owner(folder)
        except (OSError, ValueError):
            return
        os.environ[_TORCH_FOLDER] = str(folder)


def _read(path: Path) -> tuple[dict[str, Any], bytes]:
    with path.open("rb") as file:
        _check_owner(path.parent)
        _check_owner(path, os.fstat(file.fileno()))
        content = file.read()
    if not content.startswith(_MAGIC):
        raise ValueError("it is not a file of this cache")
    digest, _, rest = content[len(_MAGIC) :].partition(b"\n")
    if hashlib.sha256(rest).hexdigest().encode() != digest:
        raise ValueError("it is damaged")
    meta, _, artifacts = rest.partition(b"\n")
    found = json.loads(meta)
    if not isinstance(found, dict) or not isinstance(found.get("seconds"), dict):
        raise ValueError("it is damaged")
    return found, artifacts


def _check_owner(path: Path, status: os.stat_result | None = None) -> None:
    """Raise if others can write to ``path``, because its content is executed."""
    if not hasattr(os, "geteuid"):
        return
    status = status if status is not None else path.stat()
    if status.st_uid != os.geteuid():
        raise ValueError(f"{path} belongs to another user")
    if status.st_mode & 0o022:
        raise ValueError(f"{path} can be written by other users (chmod go-w makes it usable)")

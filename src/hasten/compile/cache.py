"""What was compiled, kept for the next run of the same program: torch's cache artifacts, one file a model.

Files lie in ``compile`` in ``HASTEN_CACHE``, or in ``hasten`` in the user's cache folder. Artifacts hold pickles, as
torch's own cache folder does: a file is read only if it and its folder belong to this user alone, and if it is whole.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hasten._lib.rank_zero import rank_zero_info
from hasten.compile.settings import CompileSettings

_MAGIC = b"hasten compile 1\n"
# torch keeps here what the artifacts do not hold: on the CPU, the machine code.
_TORCH_FOLDER = "TORCHINDUCTOR_CACHE_DIR"


def cache_folder() -> Path:
    """Return where compiled artifacts are kept: ``HASTEN_CACHE``, else ``hasten`` in the user's cache folder.

    Example::

        >>> os.environ["HASTEN_CACHE"] = "/data/cache"
        >>> cache_folder().as_posix()
        '/data/cache/compile'
        >>> del os.environ["HASTEN_CACHE"]

    """
    chosen = os.environ.get("HASTEN_CACHE")
    if chosen:
        return Path(chosen).expanduser() / "compile"
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path("~/.cache").expanduser()) / "hasten" / "compile"


def key_of(module: nn.Module, settings: CompileSettings, device: torch.device, variant: str = "") -> str:
    """Return a name for what compiling ``module`` gives: the same for the same structure, options and machine.

    Args:
        module: the model.
        settings: how it is compiled.
        device: where it computes.
        variant: what else decides what is computed, such as the precision.

    """
    parts = [
        torch.__version__,
        platform.python_version(),
        platform.machine(),
        str(torch.cuda.get_device_name(device))
        if device.type == "cuda"
        else torch.backends.cpu.get_cpu_capability(),
        settings.recipe,
        variant,
        *(
            f"{name} {type(part).__module__}.{type(part).__qualname__}"
            for name, part in module.named_modules()
        ),
        *(f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in module.named_parameters()),
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]


class Artifacts:
    """The file of one model.

    Args:
        key: its name; see ``key_of``.

    """

    def __init__(self, key: str) -> None:
        self.path = cache_folder() / f"{key}.bin"
        # What the first so many graphs took in the run that made them; empty without a file.
        self.cold_seconds: dict[int, float] = {}

    def load(self) -> None:
        """Give torch what an earlier run compiled; a file that cannot be used is dropped, and said in one line."""
        self._keep_torchs_folder()
        try:
            content = _read(self.path)
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            self._drop(str(error))
            return
        meta, artifacts = content
        if meta.get("torch") != torch.__version__:
            self._drop(f"it was written by torch {meta.get('torch')}")
            return
        try:
            loaded = torch.compiler.load_cache_artifacts(artifacts) is not None
        except Exception as error:  # Whatever is wrong with it, a cache must never stop a run.
            self._drop(f"torch cannot read it ({type(error).__name__})")
            return
        if not loaded:
            self._drop("torch cannot read it")
            return
        self.cold_seconds = {int(graphs): float(seconds) for graphs, seconds in meta["seconds"].items()}

    def save(self, seconds: dict[int, float]) -> None:
        """Write what torch has compiled in this process, whole or not at all.

        Args:
            seconds: what the first so many graphs took without a cache.

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
            _write(self.path, _MAGIC + digest + meta + artifacts)
        except Exception as error:  # A full or read-only disk, or artifacts that cannot be written out.
            rank_zero_info(
                f"The compile cache was not written to {self.path} ({error}). The run is not affected."
            )

    def _drop(self, reason: str) -> None:
        rank_zero_info(f"The compile cache {self.path} is not used: {reason}. It will be made again.")
        with contextlib.suppress(OSError):
            self.path.unlink()

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
        raise ValueError("it is no file of this cache")
    digest, _, rest = content[len(_MAGIC) :].partition(b"\n")
    if hashlib.sha256(rest).hexdigest().encode() != digest:
        raise ValueError("it is damaged")
    meta, _, artifacts = rest.partition(b"\n")
    found = json.loads(meta)
    if not isinstance(found, dict) or not isinstance(found.get("seconds"), dict):
        raise ValueError("it is damaged")
    return found, artifacts


def _check_owner(path: Path, status: os.stat_result | None = None) -> None:
    """Raise if others could have written to ``path``: what it holds is executed."""
    if not hasattr(os, "geteuid"):
        return
    status = status if status is not None else path.stat()
    if status.st_uid != os.geteuid():
        raise ValueError(f"{path} belongs to another user")
    if status.st_mode & 0o022:
        raise ValueError(f"{path} can be written by other users (chmod go-w makes it usable)")


def _write(path: Path, content: bytes) -> None:
    descriptor, beside = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".part")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        raise

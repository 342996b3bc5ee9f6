"""``hasten env``: print the facts about this machine and its packages that a bug report needs."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from hasten.commands.parser import Parser

# Besides the packages that hasten and its extras need: packages that explain what a program does.
_ALSO = (
    "lightning", "pytorch-lightning", "transformers", "accelerate", "datasets", "peft", "timm", "torchvision",
    "torchaudio", "torchdata", "triton", "flash-attn", "xformers", "numpy", "pandas", "webdataset",
)  # fmt: skip
# Development tools; they run in no training program.
_TOOLS = re.compile(r"(mkdocs|pytest|ruff|mypy|types-|build$|hasten$|docstring-parser)")
# In the order of x86 and ARM processors: what matrix products and 16-bit numbers use.
_INSTRUCTIONS = (
    "avx2", "fma", "avx_vnni", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16", "avx512_fp16",
    "amx_tile", "amx_int8", "amx_bf16", "amx_fp16",
    "asimd", "asimddp", "asimdhp", "sve", "sve2", "bf16", "i8mm", "sme",
)  # fmt: skip
_VARIABLES = (
    "HASTEN_", "CUDA_", "OMP_", "NCCL_", "KMP_", "MKL_", "GLOO_", "TORCH", "PYTORCH_", "TRITON_", "MASTER_",
    "NVIDIA_", "HIP_", "ROCR_", "XLA_", "PJRT_", "TPU_",
)  # fmt: skip
_VARIABLE_NAMES = (
    "RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LD_PRELOAD", "TOKENIZERS_PARALLELISM",
    "SLURM_NNODES", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", "SLURM_CPUS_PER_TASK", "SLURM_PROCID", "SLURM_LOCALID",
)  # fmt: skip
_SECRET = re.compile(r"(key|token|secret|passw|pwd|credential|auth|cookie|jwt)", re.IGNORECASE)
# Set by hasten/__init__.py.
_OWN = "PYTORCH_NVML_BASED_CUDA_CHECK"
# The user's part of a URL: https://user:password@host
_USER_OF_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_HIDDEN = "(set; not shown)"
_SECONDS = 10.0
_LABEL = 14


def main(arguments: Sequence[str]) -> int:
    """Print; return the exit code."""
    options = make_parser().parse(arguments)
    found = environment()
    print(json.dumps(found, indent=2) if options.json else as_text(found))
    return 0


def make_parser() -> Parser:
    """Return what reads the arguments of this command."""
    parser = Parser(
        prog="hasten env",
        description="Print what a bug report needs: versions, how torch was built, processor, memory, GPUs, and "
        "environment variables. Values of variables that may be secrets are not shown.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def environment() -> dict[str, Any]:
    """Return what ``hasten env`` prints, as plain data.

    Example::

        >>> sorted(environment())
        ['cpu', 'environment', 'gpus', 'hasten', 'memory', 'notes', 'packages', 'python', 'system', 'torch']

    """
    from hasten._lib import VERSION
    from hasten.extend import origin
    from hasten.record.about import GitState, host

    folder = Path(origin.SOURCE).resolve() / "hasten"
    # Only the source tree of hasten itself has a state worth telling; an installed package may lie in any repository.
    git = GitState(folder) if (folder.parents[1] / ".git").exists() else None
    of_host = host()
    gpus, driver = _gpus()
    packages = _packages()
    torch_build = _torch()
    return {
        "hasten": {"version": VERSION, "folder": str(folder), "git": None if git is None else git.read()},
        "python": {
            "version": platform.python_version(),
            "implementation": platform.python_implementation(),
            "executable": sys.executable,
        },
        "torch": torch_build,
        "system": {"name": platform.platform(), "container": _container()},
        "cpu": {"name": of_host["cpu"], **_processor(), "usable_cores": of_host["cores"]},
        "memory": {"total_bytes": of_host["memory_bytes"], **_memory()},
        "gpus": {"driver": driver, "devices": gpus},
        "packages": packages,
        "environment": variables(os.environ),
        "notes": _notes(torch_build, gpus, driver, packages),
    }


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that change how a program trains, by name; values that may be secrets are replaced.

    Example::

        >>> variables({"OMP_NUM_THREADS": "4", "HASTEN_API_KEY": "abc", "WANDB_API_KEY": "abc", "HOME": "/root"})
        {'HASTEN_API_KEY': '(set; not shown)', 'OMP_NUM_THREADS': '4'}

    """
    shown = {}
    for name in sorted(environ):
        if (name.startswith(_VARIABLES) and name != _OWN) or name in _VARIABLE_NAMES:
            shown[name] = _HIDDEN if _SECRET.search(name) else _USER_OF_URL.sub("***", environ[name])
    return shown


def as_text(found: Mapping[str, Any]) -> str:
    """Return ``environment()`` as lines for a terminal or an issue."""
    hasten, python, torch = found["hasten"], found["python"], found["torch"]
    cpu, memory, gpus = found["cpu"], found["memory"], found["gpus"]
    git = hasten["git"]
    commit = "" if git is None or not git["commit"] else f", commit {git['commit'][:10]}{' + changes' * git['dirty']}"
    built = [f"CUDA {torch['cuda']}" if torch["cuda"] else f"ROCm {torch['hip']}" if torch["hip"] else "CPU only"]
    built += [f"{name} {torch[key]}" for name, key in (("cuDNN", "cudnn"), ("NCCL", "nccl")) if torch[key]]
    cores = f"{cpu['usable_cores']} usable" + (f" of {cpu['threads']}" if cpu["threads"] else "")
    nodes = f", {cpu['numa_nodes']} NUMA nodes" if (cpu["numa_nodes"] or 0) > 1 else ""
    lines = [
        _line("hasten", f"{hasten['version']}{commit}, {hasten['folder']}"),
        _line("Python", f"{python['version']} ({python['implementation']}), {python['executable']}"),
        _line("torch", f"{torch['version']} ({', '.join(built)})"),
        *(_line("" if index else "torch build", each) for index, each in enumerate(torch["libraries"])),
        _line("torch threads", f"{torch['threads']} in an operation, {torch['interop_threads']} between operations"),
        _line("system", found["system"]["name"] + (", in a container" if found["system"]["container"] else "")),
        _line("processor", f"{cpu['name']}, cores: {cores}{nodes}"),
        _line("instructions", f"{' '.join(cpu['instructions']) or 'unknown'}; torch uses {torch['cpu_capability']}"),
        _line(
            "memory",
            f"{_gib(memory['total_bytes'])}, {_gib(memory['available_bytes'])} available; "
            f"/dev/shm {_gib(memory['shared_memory_free_bytes'])} free",
        ),
        _line("GPU driver", gpus["driver"] or "none"),
        *(_line("" if index else "GPUs", _gpu(index, each)) for index, each in enumerate(gpus["devices"])),
        "",
        "Packages",
        *textwrap.wrap(
            " ".join(f"{name}=={version}" for name, version in found["packages"].items()),
            100, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False,
        ),
        "",
        "Environment variables",
        *(f"  {name}={value}" for name, value in found["environment"].items()),
        *(["  none that hasten or torch read"] if not found["environment"] else []),
    ]  # fmt: skip
    if found["notes"]:
        lines += ["", "Notes", *(f"  {note}" for note in found["notes"])]
    return "\n".join(lines)


def _line(label: str, text: str) -> str:
    return f"{label:<{_LABEL}}{text}"


def _gib(size_bytes: int | None) -> str:
    return "unknown" if size_bytes is None else f"{size_bytes / 2**30:.1f} GiB"


def _gpu(index: int, gpu: Mapping[str, Any]) -> str:
    capability = "" if gpu["capability"] is None else f", compute capability {gpu['capability']}"
    return f"{index}: {gpu['name']}, {_gib(gpu['memory_bytes'])}{capability}"


def _torch() -> dict[str, Any]:
    import torch

    config = str(torch.__config__.show())
    built_in = ("GCC", "Clang", "MSVC", "Intel", "OpenMP", "NCCL", "CuDNN", "Magma")
    libraries = [line.strip(" -") for line in config.splitlines() if line.strip(" -").startswith(built_in)]
    nccl = None
    if torch.version.cuda and torch.distributed.is_available() and torch.distributed.is_nccl_available():
        with suppress(Exception):  # A build may have NCCL and no version of it.
            nccl = ".".join(map(str, torch.cuda.nccl.version()))
    cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    return {
        "version": str(torch.__version__),
        "git": torch.version.git_version,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "cudnn": None if cudnn is None else str(cudnn),
        "nccl": nccl,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "libraries": [line.partition(" for Intel(R) 64")[0].partition(" (Git Hash")[0] for line in libraries],
        "config": config,
    }


def _processor() -> dict[str, Any]:
    flags: set[str] = set()
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith(("flags", "Features")):
                flags = set(line.partition(":")[2].split())
                break
    nodes = len(list(Path("/sys/devices/system/node").glob("node[0-9]*")))
    return {
        "architecture": platform.machine(),
        "instructions": [name for name in _INSTRUCTIONS if name in flags],
        "threads": os.cpu_count(),
        "numa_nodes": nodes or None,
    }


def _memory() -> dict[str, int | None]:
    from hasten.machine.host import available_memory_bytes

    shared = None
    with suppress(OSError):
        shared = shutil.disk_usage("/dev/shm").free
    return {"available_bytes": available_memory_bytes(), "shared_memory_free_bytes": shared}


def _container() -> bool:
    return (
        Path("/.dockerenv").exists() or Path("/run/.containerenv").exists() or "KUBERNETES_SERVICE_HOST" in os.environ
    )


def _gpus() -> tuple[list[dict[str, Any]], str | None]:
    """Return the GPUs that torch can use, or else those that the driver knows; and the driver's version."""
    import torch

    known = _nvidia_smi()
    driver = f"NVIDIA {known[0]['driver']}" if known else None
    if torch.cuda.is_available():
        seen = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        return [
            {"name": one.name, "memory_bytes": one.total_memory, "capability": f"{one.major}.{one.minor}"}
            for one in seen
        ], driver
    if torch.backends.mps.is_available():
        size = torch.mps.recommended_max_memory()
        return [{"name": "Apple GPU (mps)", "memory_bytes": size, "capability": None}], "macOS " + platform.mac_ver()[0]
    return [{name: one[name] for name in ("name", "memory_bytes", "capability")} for one in known], driver


def _nvidia_smi() -> list[dict[str, Any]]:
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    query = [command, "--query-gpu=name,memory.total,compute_cap,driver_version", "--format=csv,noheader,nounits"]
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(query, capture_output=True, text=True, timeout=_SECONDS, check=True)
        return list(read_nvidia_smi(done.stdout.splitlines()))
    return []


def read_nvidia_smi(lines: Iterable[str]) -> Iterable[dict[str, Any]]:
    """Yield a dict for each line of nvidia-smi's answer.

    Example::

        >>> list(read_nvidia_smi(["NVIDIA H200, 143771, 9.0, 570.86.15"]))
        [{'name': 'NVIDIA H200', 'memory_bytes': 150754820096, 'capability': '9.0', 'driver': '570.86.15'}]

    """
    for line in lines:
        fields = [field.strip() for field in line.rsplit(",", 3)]
        if len(fields) == 4:
            name, mebibytes, capability, driver = fields
            size = int(mebibytes) * 2**20 if mebibytes.isdigit() else None
            yield {"name": name, "memory_bytes": size, "capability": capability, "driver": driver}


def _packages() -> dict[str, str]:
    names = set(_ALSO)
    with suppress(metadata.PackageNotFoundError):
        for requirement in metadata.requires("hasten") or ():
            name = re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]
            if name != "torch" and not _TOOLS.match(name):
                names.add(name.lower().replace("_", "-"))
    found = {}
    for name in sorted(names):
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _notes(
    torch_build: Mapping[str, Any], gpus: Sequence[Any], driver: str | None, packages: Mapping[str, str]
) -> list[str]:
    """Return what in this environment is likely to be a mistake, and what to do."""
    import torch

    notes = []
    if gpus and driver is not None and driver.startswith("NVIDIA") and not torch.cuda.is_available():
        if torch_build["cuda"] is None:
            notes.append(
                f"The driver finds {len(gpus)} GPU(s), but this torch is built without CUDA. Install one with CUDA: "
                "https://pytorch.org/get-started/locally"
            )
        elif os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
            notes.append("CUDA_VISIBLE_DEVICES hides all GPUs. Unset it to use them.")
        else:
            notes.append(
                f"torch is built for CUDA {torch_build['cuda']} and cannot use the GPU(s) of driver {driver}. Update "
                "the driver, or install a torch for an earlier CUDA."
            )
    if "lightning" in packages and "pytorch-lightning" in packages:
        notes.append("lightning and pytorch-lightning are both installed: their classes do not mix.")
    return notes

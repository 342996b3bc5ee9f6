"""Packages that only some features need, imported where they are used."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import os
import random
from pathlib import Path
from types import ModuleType
from urllib.parse import urlsplit
from urllib.request import url2pathname

from hasten._lib.errors import make_error

# Packages whose name differs from the name of their module.
_PACKAGES = {
    "sklearn": "scikit-learn",
    # Without the extra, the part for PyTorch is not installed.
    "transformer_engine": "'transformer_engine[pytorch]'",
    "yaml": "PyYAML",
}

# The extra of hasten that has a module, by the module's name. docs/install.md describes them.
EXTRAS = {
    "bitsandbytes": "bitsandbytes",
    "comet_ml": "comet",
    "deepspeed": "deepspeed",
    "docstring_parser": "cli",
    "jinja2": "report",
    "jsonargparse": "cli",
    "libcst": "migrate",
    "matplotlib": "plots",
    "mlflow": "mlflow",
    "onnx": "onnx",
    "onnxscript": "onnx",
    "plotly": "report",
    "psutil": "stats",
    "rich": "rich",
    "safetensors": "safetensors",
    "schedulefree": "schedulefree",
    "shtab": "completion",
    "sklearn": "demo",
    "tensorboard": "tensorboard",
    "torch_xla": "tpu",
    "torchao": "fp8",
    "transformer_engine": "transformer-engine",
    "transformers": "demo",
    "wandb": "wandb",
}

# Modules that a test says are missing: it patches a flag such as _RICH_AVAILABLE under Lightning's names.
hidden: set[str] = set()


def install_line(extra: str) -> str:
    """Return the line that installs an extra of hasten, or hasten alone: from where it came, as no index has the name.

    Example::

        >>> install_line("plots").endswith("[plots]'")
        True

    """
    url, folder = _origin(), Path(__file__).resolve().parents[3]
    extra = f"[{extra}]" if extra else ""
    if url.startswith("file:") and os.path.isdir(path := url2pathname(urlsplit(url).path)):
        return f"pip install '{_seen_from_here(path)}{extra}'"
    if url:
        return f"pip install 'hasten{extra} @ {url}'"
    if (folder / "pyproject.toml").is_file() and (folder / "src" / "hasten").is_dir():
        return f"pip install '{_seen_from_here(str(folder))}{extra}'"
    return f"pip install 'hasten{extra}'"


def _origin() -> str:
    """Return the address that pip has installed this hasten from; "" where it has not noted one."""
    try:
        found = json.loads(importlib.metadata.distribution("hasten").read_text("direct_url.json") or "{}")
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return ""
    url, version = str(found.get("url", "")), found.get("vcs_info", {})
    if not version:
        return url
    revision = version.get("requested_revision") or version.get("commit_id")
    return f"{version['vcs']}+{url}" + (f"@{revision}" if revision else "")


def _seen_from_here(folder: str) -> str:
    # pip takes a path without a slash for a name.
    return "." if os.path.realpath(folder) == os.path.realpath(os.curdir) else folder


def installed(name: str) -> bool:
    """Return whether a module can be imported, without importing it."""
    try:
        return name not in hidden and importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def need(name: str, *, purpose: str) -> ModuleType:
    """Import and return a module; if it is not installed, raise an error with the line that installs it."""
    top = name.split(".")[0]
    # Importing rich draws random numbers, which would change those of a seeded program.
    random_state = random.getstate()
    try:
        if top in hidden:
            raise ModuleNotFoundError(name=top)
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.split(".")[0] != top:
            raise
        package = _PACKAGES.get(top, top)
        extra = f" (or: {install_line(EXTRAS[top])})" if top in EXTRAS else ""
        what = f"{purpose} needs the package {package}, which is not installed."
        raise make_error(ModuleNotFoundError, what, fix=f"Run: pip install {package}{extra}", name=top) from error
    finally:
        random.setstate(random_state)

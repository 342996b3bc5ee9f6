"""Packages that only some features need, imported where they are used."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

# Packages whose name differs from that of the module.
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


def installed(name: str) -> bool:
    """Return whether a module can be imported, without importing it."""
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def need(name: str, *, purpose: str) -> ModuleType:
    """Import and return a module.

    Args:
        name: the module, for instance ``"matplotlib.pyplot"``.
        purpose: the feature that needs it, for the message.

    Raises:
        ModuleNotFoundError: it is not installed; the message has the line that installs it.

    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.split(".")[0] != name.split(".")[0]:
            raise
        top = name.split(".")[0]
        package = _PACKAGES.get(top, top)
        extra = f" (or: pip install 'hasten[{EXTRAS[top]}]')" if top in EXTRAS else ""
        raise ModuleNotFoundError(
            f"{purpose} needs the package {package}, which is not installed. Run: pip install {package}{extra}",
            name=top,
        ) from error

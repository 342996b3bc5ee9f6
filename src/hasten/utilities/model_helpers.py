"""Modules, as programs of the field ask about them."""

from __future__ import annotations

import inspect
from typing import Any

from hasten._lib.absent import absent
from hasten._lib.optional import need
from hasten.hooks import overrides
from hasten.module import LightningModule
from hasten.module.callback import Callback
from hasten.module.datamodule import LightningDataModule
from hasten.report.summary import ModelSummary

DeepSpeedSummary = absent(
    "DeepSpeedSummary",
    ModelSummary,
    home="hasten.utilities.model_helpers",
    instead="Use ModelSummary.",
)


def is_overridden(method_name: str, instance: object | None = None, parent: type | None = None) -> bool:
    """Return whether an object has its own version of a method.

    Args:
        method_name: the method.
        instance: the object.
        parent: the class whose version does not count; by default LightningModule, LightningDataModule or Callback,
            whichever the object is.

    Raises:
        ValueError: no class was given, and the object is of none of these.

    Example::

        >>> from hasten.demos import BoringModel
        >>> is_overridden("training_step", BoringModel()), is_overridden("on_fit_end", BoringModel())
        (True, False)

    """
    if instance is None:
        return False
    if parent is None:
        kinds = (LightningModule, LightningDataModule, Callback)
        parent = next((kind for kind in kinds if isinstance(instance, kind)), None)
        if parent is None:
            raise ValueError(
                f"is_overridden({method_name!r}, {type(instance).__name__} object): say of which class, parent=..."
            )
    if not hasattr(parent, method_name):
        raise ValueError(f"is_overridden({method_name!r}): {parent.__name__} has no such method.")
    return hasattr(instance, method_name) and overrides(instance, parent, method_name)


def get_torchvision_model(model_name: str, **kwargs: Any) -> Any:
    """Return a model of torchvision.

    Args:
        model_name: its name there.
        kwargs: for it, for instance ``weights``.

    """
    return need("torchvision.models", purpose="get_torchvision_model").get_model(model_name, **kwargs)


def get_formatted_model_size(total_model_size: float) -> str:
    """Return a size in MB as a text.

    Example::

        >>> get_formatted_model_size(12.345)
        '12.345'

    """
    return f"{total_model_size:,.3f}"


def is_param_in_hook_signature(
    hook_fx: Any, param: str, explicit: bool = False, min_args: int | None = None
) -> bool:
    """Return whether a function takes a parameter.

    Args:
        hook_fx: the function.
        param: the parameter.
        explicit: by its name only; otherwise ``*args`` counts, and so do ``min_args`` parameters.
        min_args: so many parameters are enough.

    Example::

        >>> is_param_in_hook_signature(lambda batch, batch_idx: None, "batch_idx")
        True

    """
    parameters = inspect.signature(inspect.unwrap(hook_fx)).parameters
    names = [name for name in parameters if name != "self"]
    if param in names or explicit:
        return param in names
    takes_any = any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters.values())
    return takes_any or (min_args is not None and len(names) >= min_args)


def do_nothing_closure() -> None:
    """Do nothing, where a closure is asked for."""

"""Modules: overridden methods, device and type, gradient norms, shared parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hasten import Callback, LightningDataModule, LightningModule
from hasten._lib.errors import make_error
from hasten._lib.lazy import attach
from hasten._lib.optional import need
from hasten._lib.tree import whole
from hasten.hooks import overrides

if TYPE_CHECKING:
    from hasten_deepspeed.summary import DeepSpeedSummary as DeepSpeedSummary

# The class of a backend is imported when it is used.
__getattr__ = attach(__name__, {"hasten_deepspeed.summary": "DeepSpeedSummary"})[0]


def is_overridden(method_name: str, instance: object | None = None, parent: type | None = None) -> bool:
    """Return whether ``instance`` overrides a method of ``parent``.

    Args:
        method_name: the method.
        instance: the object; without one the answer is False.
        parent: the base class; by default LightningModule, LightningDataModule or Callback.

    Raises:
        ValueError: ``parent`` is needed, or does not have a method that the object has.

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
                f"is_overridden({method_name!r}, {type(instance).__name__} object): Expected a parent, write parent=..."
            )
    if not hasattr(instance, method_name):
        return False
    if not hasattr(parent, method_name):
        raise ValueError(
            f"is_overridden({method_name!r}): The parent should define the method. {parent.__name__} does not."
        )
    return overrides(instance, parent, method_name)


def get_torchvision_model(model_name: str, **kwargs: object) -> nn.Module:
    """Return a model of torchvision by name; ``kwargs`` are for the model, for instance ``weights``."""
    models = need("torchvision.models", purpose="get_torchvision_model")
    model: nn.Module = models.get_model(model_name, **kwargs)
    return model


def get_formatted_model_size(total_model_size: float) -> str:
    """Return a size in MB as a text with three decimals."""
    return f"{total_model_size:,.3f}"


def is_param_in_hook_signature(
    hook_fx: Callable[..., Any], param: str, explicit: bool = False, min_args: int | None = None
) -> bool:
    """Return whether a function takes a parameter, by name or as one of ``*args``; if ``explicit``, only by name.

    ``min_args`` is a number of parameters that is enough too.
    """
    parameters = inspect.signature(inspect.unwrap(hook_fx)).parameters
    names = [name for name in parameters if name != "self"]
    if param in names or explicit:
        return param in names
    takes_any = any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters.values())
    return takes_any or (min_args is not None and len(names) >= min_args)


def do_nothing_closure() -> None:
    """Do nothing."""


def is_cuda_available() -> bool:
    """Return whether this machine has a CUDA device."""
    return torch.cuda.device_count() > 0


class DeviceDtypeMixin(nn.Module):
    """A module with the ``device`` and ``dtype`` of its first parameter or buffer."""

    @property
    def device(self) -> torch.device:
        """The device of the first parameter or buffer; the CPU without one."""
        return next((t.device for t in (*self.parameters(), *self.buffers())), torch.device("cpu"))

    @property
    def dtype(self) -> torch.dtype:
        """The type of the first floating parameter or buffer; torch's default without one."""
        kinds = (t.dtype for t in (*self.parameters(), *self.buffers()) if t.is_floating_point())
        return next(kinds, torch.get_default_dtype())

    @dtype.setter
    def dtype(self, new_dtype: str | torch.dtype) -> None:
        raise make_error(RuntimeError, "Cannot set the dtype explicitly.", fix=f"Write module.to({new_dtype}).")


def grad_norm(module: nn.Module, norm_type: float | int | str, group_separator: str = "/") -> dict[str, Tensor]:
    """Return the norm of each parameter's gradient, and of all together.

    Args:
        module: the module; parameters without a gradient are left out.
        norm_type: p of the p-norm, above 0; ``"inf"`` for the largest value.
        group_separator: between "grad_2.0_norm" and the parameter's name.

    Returns:
        0-d tensors, by name; the last one is ``grad_<p>_norm_total``. Nothing is read from the device. Of a gradient
        that is divided over processes it is the norm of the whole: all of them call this.

    Raises:
        ValueError: ``norm_type`` is not above 0.

    Example::

        >>> layer = nn.Linear(1, 1, bias=False)
        >>> layer.weight.grad = torch.full((1, 1), 3.0)
        >>> grad_norm(layer, 2)
        {'grad_2.0_norm/weight': tensor(3.), 'grad_2.0_norm_total': tensor(3.)}

    Source: `torch.nn.utils.get_total_norm <https://docs.pytorch.org/docs/stable/nn.html>`_.

    """
    power = float(norm_type)
    if not power > 0:
        what = f"grad_norm: `norm_type` must be a positive number or 'inf' (infinity norm). Got {norm_type}."
        raise make_error(ValueError, what, argument="norm_type")
    name = f"grad_{power}_norm"
    norms = {
        f"{name}{group_separator}{parameter}": whole(torch.linalg.vector_norm(p.grad.detach(), power))
        for parameter, p in module.named_parameters()
        if p.grad is not None
    }
    if norms:
        norms[f"{name}_total"] = torch.linalg.vector_norm(torch.stack(list(norms.values())), power)
    return norms


def find_shared_parameters(module: nn.Module) -> list[list[str]]:
    """Return the names under which each shared parameter of a module appears, a list for each.

    Example::

        >>> tied = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        >>> tied[1].weight = tied[0].weight
        >>> find_shared_parameters(tied)
        [['0.weight', '1.weight']]

    """
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [found for found in names.values() if len(found) > 1]


def set_shared_parameters(module: nn.Module, shared_params: list[list[str]]) -> nn.Module:
    """Share the parameters in each list of names, of which the first is kept; return the module.

    Args:
        module: the module.
        shared_params: the lists that ``find_shared_parameters`` returned.

    """
    for first, *others in shared_params:
        parameter = module.get_parameter(first)
        for name in others:
            owner, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(owner), attribute, parameter)
    return module

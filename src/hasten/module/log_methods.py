"""``log`` and ``log_dict``, the same for modules and callbacks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import MethodType
from typing import TYPE_CHECKING, Any

from torch import nn

from hasten._lib.errors import WrongType, make_error

if TYPE_CHECKING:
    from hasten.fabric import Fabric
    from hasten.logged_values import LoggedValues
    from hasten.types import Group, MetricValue


class LogMethods:
    """``log`` and ``log_dict``."""

    # Annotated for type checkers only: TorchScript reads annotations of classes.
    if TYPE_CHECKING:
        _run_values: LoggedValues | None
        _fabric: Fabric | None

    _run_values = None
    _fabric = None

    def log(
        self,
        name: str,
        value: MetricValue,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: str | Callable[..., Any] = "mean",
        enable_graph: bool = False,
        sync_dist: bool = False,
        sync_dist_group: Group = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        metric_attribute: str | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        """Log a value. It stays on its device until the next logging interval; nothing waits for the device.

        Args:
            name: the key.
            value: a number, a tensor with one element, or a ``torchmetrics.Metric``.
            prog_bar: show it in the progress bar.
            logger: pass it to the loggers; True by default.
            on_step: publish the value of each step; by default True in training steps.
            on_epoch: publish one value per epoch; by default True in evaluation and in epoch hooks.
            reduce_fx: how the values of an epoch become one: "mean" (weighted by batch size), "sum", "min", "max".
            enable_graph: keep the autograd graph of the value.
            sync_dist: reduce over all processes.
            sync_dist_group: ignored; reductions are over all processes.
            add_dataloader_idx: append the index of the loader to the name if there are several.
            batch_size: number of samples in the batch; read from the batch by default.
            metric_attribute: ignored; metrics are found by identity.
            rank_zero_only: use the value of the first process only.

        Raises:
            ValueError: values cannot be logged in this hook, or the value has more than one element.
            RuntimeError: a callback logs, and no run is in progress.

        """
        # The fields of LogOptions, as a plain tuple: its constructor would cost as much as the rest of this call.
        options = (
            prog_bar, logger, on_step, on_epoch, reduce_fx, enable_graph, sync_dist, sync_dist_group,
            add_dataloader_idx, metric_attribute, rank_zero_only,
        )  # fmt: skip
        logged = self._run_values
        if logged is None:
            self._log_elsewhere(name, value, options, batch_size)
        else:
            logged.record(name, value, options, batch_size)

    def log_dict(
        self,
        dictionary: Mapping[str, MetricValue],
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: str | Callable[..., Any] = "mean",
        enable_graph: bool = False,
        sync_dist: bool = False,
        sync_dist_group: Group = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        """Log several values (or a ``MetricCollection``) with the same options; see ``log``."""
        if hasattr(dictionary, "keep_same_keys") or type(dictionary).__name__ == "MetricCollection":
            items = dictionary.items(keep_base=False, copy_state=False)  # type: ignore[call-arg]
        elif hasattr(dictionary, "items"):
            items = dictionary.items()
        else:
            raise WrongType(
                f"self.log_dict({dictionary!r:.60}):",
                fix=(
                    "use a dict of names and values, self.log_dict({'loss': loss}), not a "
                    f"{type(dictionary).__name__}. For one value write self.log(name, value)."
                ),
            )
        if self._fabric is not None:
            self._log_into_fabric(dict(items), logger)
            return
        for name, value in items:
            # By name: programs override log with the parameters that they use, and **kwargs.
            self.log(
                name=name, value=value, prog_bar=prog_bar, logger=logger, on_step=on_step, on_epoch=on_epoch,
                reduce_fx=reduce_fx, enable_graph=enable_graph, sync_dist=sync_dist, sync_dist_group=sync_dist_group,
                add_dataloader_idx=add_dataloader_idx, batch_size=batch_size, rank_zero_only=rank_zero_only,
            )  # fmt: skip

    def _log_into_fabric(self, values: Mapping[str, Any], logger: bool | None) -> None:
        """Give values to the loggers of Fabric as one row."""
        for name, value in values.items():
            if isinstance(value, (list, tuple, dict, str)):
                what = f"self.log({name!r}, {value!r:.80}): `{type(value).__name__}` values cannot be logged."
                fix = "Log one number by its name, and several with self.log_dict({name: number, ...})."
                raise make_error(ValueError, what, fix=fix)
        if self._fabric is not None and logger is not False:
            self._fabric.log_dict(metrics=values)

    def _log_elsewhere(self, name: str, value: MetricValue, options: tuple[Any, ...], batch_size: int | None) -> None:
        """Log without values of a run."""
        raise NotImplementedError


class Unlisted:
    """A method that is not listed among the functions of its class, as programs list the hooks of ``Callback``."""

    def __init__(self, function: Callable[..., None]) -> None:
        functools.update_wrapper(self, function)
        self.__func__ = function

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else MethodType(self.__func__, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.__func__(*args, **kwargs)


def log_into(module: nn.Module, values: LoggedValues | None) -> None:
    """Let ``module`` and the modules in it log into the values of a run; None for no run of a Trainer."""
    for child in module.modules():
        if isinstance(child, LogMethods):
            child.__dict__["_run_values"] = values

"""Callbacks and loggers under Lightning's names whose parameters differ from hasten's."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Literal

from hasten.callbacks import lambda_function
from hasten.loggers import comet
from hasten_lightning.facades import Facade, accepted, exactly, show_signature

# In the order in which they are parameters.
_HOOKS = [
    "setup",
    "teardown",
    "on_fit_start",
    "on_fit_end",
    "on_sanity_check_start",
    "on_sanity_check_end",
    "on_train_batch_start",
    "on_train_batch_end",
    "on_train_epoch_start",
    "on_train_epoch_end",
    "on_validation_epoch_start",
    "on_validation_epoch_end",
    "on_test_epoch_start",
    "on_test_epoch_end",
    "on_validation_batch_start",
    "on_validation_batch_end",
    "on_test_batch_start",
    "on_test_batch_end",
    "on_train_start",
    "on_train_end",
    "on_validation_start",
    "on_validation_end",
    "on_test_start",
    "on_test_end",
    "on_exception",
    "on_save_checkpoint",
    "on_load_checkpoint",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
    "on_predict_start",
    "on_predict_end",
    "on_predict_batch_start",
    "on_predict_batch_end",
    "on_predict_epoch_start",
    "on_predict_epoch_end",
]
_SELF = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
_HOOK_SIGNATURE = inspect.Signature([
    _SELF,
    *(_SELF.replace(name=name, default=None, annotation=Callable[..., Any] | None) for name in _HOOKS),
])  # fmt: skip


def _with_hooks(init: Callable[..., None]) -> Callable[..., None]:
    show_signature(init, _HOOK_SIGNATURE)
    return init


class LambdaCallback(lambda_function.LambdaCallback, metaclass=Facade):
    @exactly
    @_with_hooks
    def __init__(self, *args: Any, **hooks: Any) -> None:
        super().__init__(**dict(zip(_HOOKS, args, strict=False)), **hooks)


class CometLogger(comet.CometLogger, metaclass=Facade):
    @exactly
    def __init__(
        self,
        *,
        api_key: str | None = None,
        workspace: str | None = None,
        project: str | None = None,
        experiment_key: str | None = None,
        mode: Literal["get_or_create", "get", "create"] | None = None,
        online: bool | None = None,
        prefix: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**accepted(comet.CometLogger, locals()), **kwargs)

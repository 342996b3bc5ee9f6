"""LambdaCallback: a callback made of functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hasten._lib import check
from hasten._lib.errors import make_error
from hasten._lib.names import did_you_mean
from hasten.module.callback import CALLBACK_HOOKS, Callback

_ALLOWED = sorted(CALLBACK_HOOKS - {"state_key", "state_dict", "load_state_dict", "runs_last"})


class LambdaCallback(Callback):
    """A callback made of functions, one for each hook given.

    Args:
        **hooks: a function by the name of a hook of ``Callback``; it takes what the hook takes, without
            ``self``. None is the same as leaving it out.

    Raises:
        TypeError: ``Callback`` does not have such a hook, or the value cannot be called.

    Example::

        >>> callback = LambdaCallback(on_train_start=lambda trainer, module: print("go"))
        >>> callback.on_train_start(None, None)
        go

    """

    def __init__(self, **hooks: Callable[..., Any] | None) -> None:
        for name, function in hooks.items():
            if name not in _ALLOWED:
                what = f"LambdaCallback({name}=...): unknown hook."
                raise make_error(TypeError, what, fix=did_you_mean(name, _ALLOWED), argument=name)
            check.callable_("LambdaCallback", name, function, allow_none=True)
            if function is not None:
                setattr(self, name, function)

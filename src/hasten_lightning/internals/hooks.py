"""Call hooks of a module, a datamodule and callbacks, for packages that add hooks of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from hasten.callbacks import Checkpoint, EarlyStopping

if TYPE_CHECKING:
    from hasten import Callback, LightningDataModule, LightningModule, Trainer


def call_lightning_module_hook(
    trainer: Trainer, hook_name: str, *args: object, pl_module: LightningModule | None = None, **kwargs: object
) -> object:
    """Call a hook of a module and return what it returns; None if it is not callable.

    Raises:
        TypeError: the trainer has no module.

    """
    module = pl_module or trainer.lightning_module
    if module is None:
        raise TypeError("No `LightningModule` is available to call hooks on.")
    return _call(trainer, module, hook_name, f"[LightningModule]{type(module).__name__}.{hook_name}", *args, **kwargs)


def call_lightning_datamodule_hook(trainer: Trainer, hook_name: str, *args: object, **kwargs: object) -> object:
    """Call a hook of the datamodule and return what it returns; None if it is not callable.

    Raises:
        TypeError: there is no datamodule.

    """
    data = trainer.datamodule
    if data is None:
        raise TypeError("No `LightningDataModule` is available to call hooks on.")
    return _call(trainer, data, hook_name, f"[LightningDataModule]{type(data).__name__}.{hook_name}", *args, **kwargs)


def call_callback_hooks(
    trainer: Trainer, hook_name: str, *args: object, monitoring_callbacks: bool | None = None, **kwargs: object
) -> None:
    """Call a hook of all callbacks with the trainer, its module, and the further arguments.

    ``monitoring_callbacks`` calls only those that stop early or save checkpoints (True), or only the others (False).
    """
    for callback in trainer.callbacks:
        if monitoring_callbacks in (None, isinstance(callback, EarlyStopping | Checkpoint)):
            action = f"[Callback]{callback.state_key}.{hook_name}"
            _call(trainer, callback, hook_name, action, trainer, trainer.lightning_module, *args, **kwargs)


def _call(trainer: Trainer, owner: Any, hook_name: str, action: str, *args: object, **kwargs: object) -> object:
    hook = getattr(owner, hook_name)
    if not callable(hook):
        return None
    with trainer.profiler.profile(action):
        return hook(*args, **kwargs)


class DataHookSelector(NamedTuple):
    """The objects with the hooks that load and move batches."""

    model: LightningModule | None
    datamodule: LightningDataModule | None


class DataConnector:
    """Where the data of a Trainer's call comes from, for programs that read it."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    @property
    def _datahook_selector(self) -> DataHookSelector:
        return DataHookSelector(self.trainer.lightning_module, self.trainer.datamodule)


class CallbackConnector:
    """The callbacks of a Trainer; packages that change the list call it."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def _attach_model_logging_functions(self) -> None:
        """Do nothing: callbacks log without it."""

    def _attach_model_callbacks(self) -> None:
        """Do nothing: a run adds what ``configure_callbacks`` returns when it begins."""

    @staticmethod
    def _reorder_callbacks(callbacks: list[Callback]) -> list[Callback]:
        """Return the callbacks with those last that save checkpoints."""
        return sorted(callbacks, key=lambda callback: isinstance(callback, Checkpoint))

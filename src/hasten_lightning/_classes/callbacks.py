"""Callbacks and loggers under Lightning's names whose parameters differ from hasten's."""

from __future__ import annotations

from typing import Any

from hasten.callbacks import checkpoint, lambda_function
from hasten.loggers import comet
from hasten_lightning.facades import Facade, accepted, exactly


class LambdaCallback(lambda_function.LambdaCallback, metaclass=Facade):
    @exactly
    def __init__(self, given: dict[str, Any]) -> None:
        super().__init__(**given)


class ModelCheckpoint(checkpoint.ModelCheckpoint, metaclass=Facade):
    pass


class CometLogger(comet.CometLogger, metaclass=Facade):
    @exactly
    def __init__(self, given: dict[str, Any], **kwargs: Any) -> None:
        super().__init__(**accepted(CometLogger, given), **kwargs)

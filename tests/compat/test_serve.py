"""Modules that can be served, under Lightning's names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import hasten_lightning
from hasten.machine.cluster import find_free_port
from tests.models import Classifier, loader, quiet
from tests.refusals import refused


@pytest.fixture(autouse=True)
def alias() -> Iterator[None]:
    pytest.importorskip("fastapi")
    pytest.importorskip("uvicorn")
    hasten_lightning.install()
    yield
    hasten_lightning.uninstall()


def model(**methods: Any) -> Any:
    from lightning.pytorch.serve import ServableModule

    class Served(Classifier, ServableModule):  # type: ignore[misc]
        def configure_payload(self) -> dict[str, Any]:
            return {"body": {"x": [1.0, 2.0]}}

        def configure_serialization(self) -> Any:
            return {"x": torch.tensor}, {"y": torch.Tensor.tolist}

        def serve_step(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"y": 2 * x}

        def configure_response(self) -> dict[str, Any]:
            return {"y": [2.0, 4.0]}

    return type("Mine", (Served,), methods)()


def test_a_module_is_served_before_training() -> None:
    from lightning.pytorch.serve import ServableModuleValidator

    serves = ServableModuleValidator(port=find_free_port())
    quiet(callbacks=[serves], limit_train_batches=1).fit(model(), loader())
    assert serves.successful
    assert serves.resp.json() == {"y": [2.0, 4.0]}
    assert serves.state_dict() == {"successful": True, "optimization": None, "server": "fastapi"}


def test_what_cannot_be_served_is_named() -> None:
    from lightning.pytorch.serve import ServableModuleValidator

    serves, trainer = ServableModuleValidator(port=find_free_port()), quiet()
    with refused(TypeError, says="ServableModule"):
        serves.on_train_start(trainer, Classifier())
    with refused(ValueError, says='"body"'):
        serves.on_train_start(trainer, model(configure_payload=lambda self: {}))
    for argument, value in (("optimization", "onnx"), ("server", "sagemaker")):
        with refused(NotImplementedError, argument):
            ServableModuleValidator(**{argument: value})

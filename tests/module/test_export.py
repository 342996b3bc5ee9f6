"""A module as TorchScript and ONNX computes what the module computes, and is left as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hasten as L
from tests.models import loader, quiet
from tests.refusals import refused


class Net(L.LightningModule):
    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(8, width)
        self.drop = nn.Dropout(0.5)
        self.drop.eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.layer(x)).relu()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0]).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


@pytest.fixture
def net() -> Net:
    model = Net()
    # Attached to a Trainer, as it is in practice.
    quiet(limit_train_batches=1).fit(model, loader())
    return model.train()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("method", ["script", "trace"])
def test_torchscript_computes_the_same_and_is_written(net: Net, method: str, tmp_path: Path) -> None:
    x = torch.randn(2, 8)
    if method == "trace":
        with refused(ValueError, fix="example_inputs"):
            net.to_torchscript(method="trace")
        net.example_input_array = torch.randn(4, 8)
    modes = [child.training for child in net.modules()]
    scripted = net.to_torchscript(tmp_path / "net.pt", method=method)
    assert [child.training for child in net.modules()] == modes
    expected = net.layer(x).relu()
    torch.testing.assert_close(scripted(x), expected)
    torch.testing.assert_close(torch.jit.load(tmp_path / "net.pt")(x), expected)
    assert not scripted.training


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("method", ["script", "trace"])
def test_torchscript_without_a_trainer_of_given_inputs(method: str) -> None:
    model = nn.Sequential(Net())[0]
    scripted = model.to_torchscript(method=method, example_inputs=torch.randn(1, 8))
    assert scripted(torch.randn(5, 8)).shape == (5, 3)
    with refused(RuntimeError, fix="__init__"):
        model.trainer
    with refused(ValueError, "method", fix="'trace'"):
        model.to_torchscript(method="tracing")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_example_passes_the_hooks_for_batches_and_a_list_holds_arguments() -> None:
    class Sum(L.LightningModule):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            assert not torch.is_grad_enabled()
            return x + y

        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return tuple(x.float() for x in batch)

    model = Sum()
    model.example_input_array = [torch.ones(2, dtype=torch.int64), torch.ones(2, dtype=torch.int64)]
    traced = model.to_torchscript(method="trace")
    assert traced(torch.ones(2), torch.ones(2)).tolist() == [2.0, 2.0]


@pytest.mark.parametrize("dynamo", [True, False])
def test_onnx_is_a_valid_model_of_the_same_weights(net: Net, dynamo: bool, tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    reference = pytest.importorskip("onnx.reference")
    if dynamo:
        pytest.importorskip("onnxscript")
    path = tmp_path / "net.onnx"
    with refused(ValueError, fix="input_sample"):
        net.to_onnx(path, dynamo=dynamo)
    net.to_onnx(path, torch.randn(2, 8), dynamo=dynamo, input_names=["x"])
    assert net.training
    model = onnx.load(path)
    onnx.checker.check_model(model)
    assert [entry.name for entry in model.graph.input] == ["x"]
    weights = {entry.name: onnx.numpy_helper.to_array(entry) for entry in model.graph.initializer}
    assert any((torch.tensor(value).shape == (3, 8)) or value.shape == (8, 3) for value in weights.values())
    evaluator = reference.ReferenceEvaluator(model)
    x = torch.randn(2, 8)
    (result,) = evaluator.run(None, {"x": x.numpy()})
    torch.testing.assert_close(torch.tensor(result), net.layer(x).relu())


def test_tensorrt_is_refused_clearly_where_it_is_missing(net: Net) -> None:
    with refused(ValueError, "ir", fix="'dynamo'"):
        net.to_tensorrt(ir="dynam")
    with refused(ValueError, "output_format", fix="'exported_program'"):
        net.to_tensorrt(output_format="onnx")
    with refused(ModuleNotFoundError, says="torch_tensorrt"):
        net.to_tensorrt(input_sample=torch.randn(1, 8))

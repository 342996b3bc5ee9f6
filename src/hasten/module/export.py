"""Export of a trained module as TorchScript, ONNX or TensorRT."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from hasten._lib import check
from hasten._lib.errors import MisconfigurationException, make_error
from hasten._lib.optional import need
from hasten._lib.rank_zero import rank_zero_deprecation
from hasten._lib.tree import move_to, preserve_modes, readable_by_jit, sharded_parameter

if TYPE_CHECKING:
    from hasten.types import PathLike, Tensors


class ModelExport:
    """The export methods of a module; none changes it."""

    if TYPE_CHECKING:
        example_input_array: Any

    # Properties that TorchScript must not compile.
    __jit_unused_properties__ = [  # noqa: RUF012 - the name and type torch.jit looks for
        "automatic_optimization", "current_epoch", "device", "device_mesh", "dtype", "example_input_array",
        "fabric", "global_rank", "global_step", "hparams", "hparams_initial", "local_rank", "logger", "loggers",
        "on_gpu", "strict_loading", "trainer",
    ]  # fmt: skip

    @torch.no_grad()
    def to_torchscript(
        self,
        file_path: PathLike | None = None,
        method: str = "script",
        example_inputs: Tensors | None = None,
        **kwargs: Any,
    ) -> torch.jit.ScriptModule:
        """Return the module as TorchScript, in eval mode.

        Args:
            file_path: where to write it; by default nowhere.
            method: "script" compiles ``forward``; "trace" records what it does with ``example_inputs``.
            example_inputs: for "trace": the arguments of ``forward``; ``example_input_array`` by default.
            kwargs: for ``torch.jit.script`` or ``torch.jit.trace``.

        Raises:
            ValueError: ``method`` is not one of these, or there is no input to trace with.

        Example::

            >>> import hasten as L, torch
            >>> class Double(L.LightningModule):
            ...     def forward(self, x):
            ...         return 2 * x
            >>> Double().to_torchscript(method="trace", example_inputs=torch.zeros(2))(torch.ones(2))
            tensor([2., 2.])

        Source: `PyTorch, TorchScript <https://docs.pytorch.org/docs/stable/jit.html>`_.

        """
        rank_zero_deprecation(
            "LightningModule.to_torchscript() is deprecated, as torch's TorchScript is. Use torch.export.export(), or "
            "to_onnx()."
        )
        check.one_of("to_torchscript", "method", method, ("script", "trace"))
        module = self._as_module()
        with _evaluating(module):
            if method == "script":
                scripted = torch.jit.script(module, **kwargs)
            else:
                example = self.example_input_array if example_inputs is None else example_inputs
                # As in the summary, a list holds the arguments of forward.
                example = tuple(example) if isinstance(example, list) else example
                inputs = self._inputs("to_torchscript(method='trace')", "example_inputs", example)
                scripted = torch.jit.trace(func=module, example_inputs=inputs, **kwargs)
        if file_path is not None:
            import fsspec

            with fsspec.open(os.fspath(file_path), "wb") as file:
                torch.jit.save(scripted, file)
        return cast("torch.jit.ScriptModule", scripted)

    @torch.no_grad()
    def to_onnx(
        self, file_path: PathLike | None = None, input_sample: Tensors | None = None, **kwargs: Any
    ) -> torch.onnx.ONNXProgram | None:
        """Write the module as ONNX, in eval mode; return what ``torch.onnx.export`` returns.

        Args:
            file_path: where to; nowhere by default, which needs the exporter of ``dynamo=True`` (torch's default).
            input_sample: the arguments of ``forward``; ``example_input_array`` by default.
            kwargs: for ``torch.onnx.export``.

        Raises:
            ModuleNotFoundError: the package onnx or onnxscript is missing.
            ValueError: there is no input sample.

        Source: `PyTorch, torch.onnx <https://docs.pytorch.org/docs/stable/onnx.html>`_.

        """
        need("onnx", purpose="LightningModule.to_onnx()")
        if kwargs.get("dynamo", True):
            need("onnxscript", purpose="LightningModule.to_onnx()")
        module = self._as_module()
        inputs = self._inputs("to_onnx()", "input_sample", input_sample)
        with _evaluating(module):
            return torch.onnx.export(module, inputs, file_path, **kwargs)

    @torch.no_grad()
    def to_tensorrt(
        self,
        file_path: PathLike | None = None,
        input_sample: Tensors | None = None,
        ir: str = "default",
        output_format: str = "exported_program",
        retrace: bool = False,
        default_device: str | torch.device = "cuda",
        **compile_kwargs: object,
    ) -> Any:
        """Return the module compiled by TensorRT.

        Args:
            file_path: where to write it; by default nowhere.
            input_sample: the arguments of ``forward``; ``example_input_array`` by default.
            ir: "default", "dynamo" or "ts".
            output_format: "exported_program" or "torchscript", of the file.
            retrace: trace the compiled module again when it is written.
            default_device: where to compile if the module is not on a CUDA device.
            compile_kwargs: for ``torch_tensorrt.compile``.

        Raises:
            ModuleNotFoundError: the package torch_tensorrt is missing.
            ValueError: an option is not one of these, or there is no input sample.

        Source: `Torch-TensorRT <https://docs.pytorch.org/TensorRT/>`_.

        """
        check.one_of("to_tensorrt", "ir", ir, ("default", "dynamo", "ts"))
        formats = ("exported_program", "torchscript")
        check.one_of("to_tensorrt", "output_format", output_format, formats)
        tensorrt = need("torch_tensorrt", purpose="LightningModule.to_tensorrt()")
        module = self._as_module()
        inputs = self._inputs("to_tensorrt()", "input_sample", input_sample)
        before = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
        device = before if before.type == "cuda" else torch.device(default_device)
        with _evaluating(module):
            try:
                inputs = move_to(inputs, device)
                compiled = tensorrt.compile(module.to(device), ir=ir, inputs=inputs, **compile_kwargs)
                if file_path is not None:
                    options: dict[str, Any] = {"output_format": output_format, "retrace": retrace}
                    tensorrt.save(compiled, os.fspath(file_path), inputs=inputs, **options)
            finally:
                module.to(before)
        return compiled

    def _as_module(self) -> nn.Module:
        assert isinstance(self, nn.Module)
        if sharded_parameter(self) is not None:
            kind = type(self).__name__
            what = f"{kind}: its parameters are divided over processes and cannot be exported here."
            raise make_error(ValueError, what, fix=f"Save a checkpoint, and export {kind}.load_from_checkpoint(path).")
        return self

    def _inputs(self, call: str, argument: str, given: Any) -> tuple[Any, ...]:
        given = self.example_input_array if given is None else given
        if given is None:
            raise MisconfigurationException(
                f"{type(self).__name__}.{call}: neither `{argument}` nor `model.example_input_array` attribute is set.",
                fix=f"Pass {argument}=..., or set self.example_input_array in __init__.",
            )
        # The hooks of the module for a batch may make of it what forward takes.
        owner: Any = self._as_module()
        moved = owner._apply_batch_transfer_handler(owner._on_before_batch_transfer(given))
        return moved if isinstance(moved, tuple) else (moved,)


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    with readable_by_jit(), preserve_modes(module):
        module.eval()
        yield

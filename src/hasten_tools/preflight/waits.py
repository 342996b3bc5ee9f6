"""Find code that makes a device wait in a step, and tensors that a module holds without registering them."""

from __future__ import annotations

import functools
import gc
import linecache
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hasten.extend.frames import caller, file_of, first_outside
from hasten.extend.origin import module_of
from hasten.logged_value import is_metric
from hasten_tools.preflight.report import Rows
from hasten_tools.preflight.said import is_of_library, place_of

if TYPE_CHECKING:
    from hasten.module import LightningModule

_PRINTS = "print(tensor)"
_READS: Mapping[Any, str] = {
    Tensor.item: ".item()",
    Tensor.tolist: ".tolist()",
    Tensor.cpu: ".cpu()",
    Tensor.numpy: ".numpy()",
    Tensor.__float__: "float(tensor)",
    Tensor.__int__: "int(tensor)",
    Tensor.__bool__: "if tensor",
    Tensor.__repr__: _PRINTS,
    Tensor.__format__: _PRINTS,
}
# Functions that free or wait, by where they are: the text to show.
_FUNCTIONS = (
    (torch.cuda, "empty_cache", "torch.cuda.empty_cache()"),
    (torch.mps, "empty_cache", "torch.mps.empty_cache()"),
    (torch.cuda, "synchronize", "torch.cuda.synchronize()"),
    (gc, "collect", "gc.collect()"),
)
# With the slash: torchmetrics and torchvision are beside it.
_FRAMEWORK = os.path.join(os.path.dirname(torch.__file__), "")
# Distributions compare their parameters and values with what they allow.
_VALIDATES = "validate_args=True"
# What is meant for no device: the LightningModule's own attribute, as it keeps it.
_KNOWN = frozenset({"_example_input_array"})


class Waits(TorchFunctionMode):
    """Records where the training step of a program reads values or frees memory, inside the block.

    ``found`` has by place in the program the number of batches and what was called there.
    """

    def __init__(self, found: dict[str, tuple[int, dict[str, None], str]]) -> None:
        super().__init__()
        self._found = found
        self._here: set[str] = set()
        self._stack = ExitStack()

    def __enter__(self) -> Waits:
        for owner, name, text in _FUNCTIONS:
            real = getattr(owner, name)
            self._stack.callback(setattr, owner, name, real)
            setattr(owner, name, self._noting(real, text))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._stack.close()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        text = _READS.get(function)
        if text is None and function is Tensor.to and "cpu" in (*args[1:2], (kwargs or {}).get("device")):
            text = '.to("cpu")'
        if text is not None:
            self._note(text)
        return function(*args, **(kwargs or {}))

    def _noting(self, real: Callable[..., Any], text: str) -> Callable[..., Any]:
        @functools.wraps(real)
        def noted(*args: Any, **kwargs: Any) -> Any:
            self._note(text)
            return real(*args, **kwargs)

        return noted

    def _note(self, text: str) -> None:
        reader = caller(2)
        frame = first_outside(reader, lambda file: file.startswith((_FRAMEWORK, __file__)))
        if frame is None or is_of_library(file_of(frame)):
            return
        file, line = file_of(frame), frame.f_lineno
        place = place_of(file, line)
        count, texts, code = self._found.get(place, (0, {}, linecache.getline(file, line).strip()))
        texts.setdefault(
            _VALIDATES if file_of(reader).startswith(os.path.join(_FRAMEWORK, "distributions", "")) else text
        )
        self._found[place] = count + (place not in self._here), texts, code
        self._here.add(place)


def check_waits(found: Mapping[str, tuple[int, dict[str, None], str]], batches: int, rows: Rows) -> None:
    """Warn of what each training step does that lets a device wait; what only some steps do is left out."""
    for place, (count, texts, code) in found.items():
        if count < min(batches, 2):
            continue
        what = _PRINTS if _PRINTS in texts else ", ".join(texts)
        frees = [text for text in texts if text.endswith(("empty_cache()", "collect()", "synchronize()"))]
        if frees:
            seen = f"{frees[0]} in each step costs more than it frees: the next step has to ask for the memory again."
            line = f"Leave {frees[0]} out of training_step."
        else:
            seen = f"{what} in each step: a device has to finish all its work before the program continues. ({code})"
            line = _instead(texts)
        rows.warning("training_step", seen, line, place)


def _instead(texts: Mapping[str, None]) -> str:
    if _PRINTS in texts:
        return 'self.log("name", value, prog_bar=True), or if batch_idx % 100 == 0: print(...)'
    if _VALIDATES in texts:
        return "Give the distribution validate_args=False when the program is right."
    if "if tensor" in texts:
        return "torch.where(condition, a, b)"
    if texts.keys() & {".cpu()", ".numpy()", ".tolist()", '.to("cpu")'}:
        return "Compute with torch on the device, or keep value.detach() and move it when the epoch ends."
    return 'self.log("name", value), with the tensor: its value is read when it is shown'


def check_tensors(module: LightningModule, rows: Rows) -> None:
    """Warn of tensors that modules of the program hold in plain attributes."""
    registered = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    for path, part in module.named_modules():
        source = sys.modules.get(module_of(type(part)))
        file = getattr(source, "__file__", None) or ""
        if is_metric(part) or is_of_library(file):
            continue
        for name, tensor in _plain_tensors(part):
            if id(tensor) in registered:
                continue
            shown = f"{type(part).__name__}.{name}"
            if isinstance(tensor, nn.Parameter) or (tensor.requires_grad and tensor.is_leaf):
                seen = f"{shown} requires gradients but is not a parameter of the module: no optimizer trains it"
                line = f"self.{name} = nn.Parameter(...), in a ParameterList or ParameterDict if there are several"
            else:
                seen = f"{shown} is a tensor and no buffer: it does not move to the device with the module"
                line = f'self.register_buffer("{name.partition("[")[0]}", ...)'
            where = f" (in {path})" if path else ""
            rows.warning("buffers", f"{seen}{where}, and it is in no checkpoint.", line)


def _plain_tensors(part: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, value in vars(part).items():
        if (name.startswith("_") and name in nn.Module().__dict__) or name in _KNOWN:
            continue
        if isinstance(value, Tensor):
            yield name, value
        elif isinstance(value, (list, tuple, dict)):
            inside: Iterable[tuple[object, object]] = value.items() if isinstance(value, dict) else enumerate(value)
            for key, one in inside:
                if isinstance(one, Tensor):
                    yield f"{name}[{key!r}]", one
                    break

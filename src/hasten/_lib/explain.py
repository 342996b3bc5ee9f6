"""Notes for errors of torch: the layer that raised the error, its inputs, and the line that usually fixes it."""

from __future__ import annotations

import inspect
import linecache
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import islice
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from hasten._lib.device import is_out_of_memory
from hasten._lib.errors import add_note, is_call_of_torch, with_article
from hasten._lib.names import did_you_mean
from hasten.extend.frames import file_of, made_in, method_owner, name_of
from hasten.extend.origin import ROOTS, comes_from, functions_reached, is_builtin, names_in, package_of, source_file

_NO_BATCH = object()


@dataclass
class _Place:
    """Where an error was raised: the layer, its inputs, and the local variables of the frames inside it."""

    error: BaseException
    batch: object = _NO_BATCH
    frames: list[FrameType] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    layer: nn.Module | None = None
    name: str = ""
    inputs: tuple[Any, ...] = ()

    def local(self, *names: str) -> tuple[Any, ...] | None:
        """Return these local variables of the innermost function that has them all, if they are tensors."""
        for frame in reversed(self.frames):
            if all(isinstance(frame.f_locals.get(name), Tensor) for name in names):
                return tuple(frame.f_locals[name] for name in names)
        return None

    def tensors(self) -> list[Tensor]:
        """Return the tensors among the inputs of the layer."""
        return [each for each in self.inputs if isinstance(each, Tensor)]

    def line(self) -> str:
        """Return the source line that raised the error."""
        if not self.frames:
            return ""
        return linecache.getline(file_of(self.frames[-1]), self.lines[-1])

    def has_batch(self) -> bool:
        """Return whether the innermost function holds the batch of the step."""
        return bool(self.frames) and any(value is self.batch for value in self.frames[-1].f_locals.values())


def explain(error: BaseException, batch: object = _NO_BATCH) -> None:
    """Add notes to an error: the layer that raised it, and the usual fix. A second call adds nothing.

    Only the traceback is read. Errors of hasten already say what to do.
    """
    if not isinstance(error, Exception) or is_builtin(type(error)):
        return
    if getattr(error, "_hasten_explained", False):
        return
    with suppress(AttributeError):
        error._hasten_explained = True  # type: ignore[attr-defined]
    # An explanation that fails must not hide the error.
    with suppress(Exception):
        place = _place_of(error, batch)
        if layer := _layer_note(place):
            error.add_note(layer)
        if remedy := _remedy_at(place):
            add_note(error, "", fix=remedy)


def remedy_for(text: str) -> str:
    """Return the line that usually fixes an error or a warning of torch; "" if none is known.

    Example::

        >>> remedy_for("mat1 and mat2 shapes cannot be multiplied (4x8 and 9x2)")
        'The layer takes 9 features and gets 8: nn.Linear(8, 2).'

    """
    return _remedy_at(_Place(RuntimeError(text)))


def describe_batch(batch: object, depth: int = 0) -> str:
    """Describe the structure of a batch in one line: types, shapes, dtypes."""
    if isinstance(batch, Tensor):
        return f"Tensor {tuple(batch.shape)} {_dtype(batch)}"
    if isinstance(batch, Mapping) and depth < 2:
        inside = ", ".join(f"{key!r}: {describe_batch(batch[key], depth + 1)}" for key in list(batch)[:6])
        return f"{type(batch).__name__} of {len(batch)} {{{inside}}}"
    if isinstance(batch, (list, tuple)) and depth < 2:
        inside = ", ".join(describe_batch(part, depth + 1) for part in batch[:4])
        more = ", ..." if len(batch) > 4 else ""
        return f"{type(batch).__name__} of {len(batch)} ({inside}{more})"
    return type(batch).__name__


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


# -- the layer


def _place_of(error: BaseException, batch: object) -> _Place:
    place = _Place(error, batch)
    trace = error.__traceback__
    while trace is not None:
        place.frames.append(trace.tb_frame)
        place.lines.append(trace.tb_lineno)
        trace = trace.tb_next
    modules = [(frame, owner) for frame in place.frames if (owner := _module_of(frame)) is not None]
    if not modules:
        return place
    # Wrappers such as DistributedDataParallel put their own name before the names of the program's layers.
    roots = [owner for _, owner in modules if not comes_from(type(owner), *_WRAPPERS)]
    root, layer = roots[0] if roots else modules[0][1], modules[-1][1]
    name = next((name for name, module in root.named_modules() if module is layer), "")
    if layer is root or (is_builtin(type(root)) and not name):
        return place
    place.layer, place.name = layer, name.replace("_orig_mod.", "")
    for frame, owner in modules:
        if owner is layer and is_call_of_torch(frame):
            place.inputs = (*frame.f_locals.get("args", ()), *frame.f_locals.get("kwargs", {}).values())
    return place


# Packages with modules that wrap modules of the program.
_WRAPPERS = ("torch", "hasten.strategies")


def _module_of(frame: FrameType) -> nn.Module | None:
    owner = method_owner(frame)
    return owner if isinstance(owner, nn.Module) else None


def _layer_note(place: _Place) -> str:
    layer = place.layer
    if layer is None:
        return ""
    tensors = place.tensors()
    got = ", ".join(describe_batch(each, 1) for each in islice(place.inputs, 3) if each is not None)
    if isinstance(layer, nn.Linear) and tensors and tensors[0].dim() and tensors[0].shape[-1] != layer.in_features:
        got = f"{tensors[0].shape[-1]} features: {got}"
    return f"{place.name} {_shown(layer)}".strip() + (f" got {got}." if got else " failed.")


def _shown(layer: nn.Module) -> str:
    """Return a layer as "Linear(100, 3)"."""
    kind, values = type(layer).__name__, []
    if comes_from(type(layer), "torch.nn"):
        for part in layer.extra_repr().split(", "):
            name, _, value = part.rpartition("=")
            if name not in ("", "in_features", "out_features"):
                break
            values.append(value)
    text = ", ".join(value for value in values if value)
    return f"{kind}({text})" if text else kind


# -- the usual fixes

_Remedy = Callable[["re.Match[str]", _Place], str]


def _remedy_at(place: _Place) -> str:
    if is_out_of_memory(place.error):
        return ""
    text = str(place.error)
    for part, kinds, remedy in _REMEDIES:
        if isinstance(place.error, kinds) and (found := re.search(part, text)):
            note = remedy if isinstance(remedy, str) else remedy(found, place)
            # An empty string: the error already says what to do.
            if note or isinstance(remedy, str):
                return note
    return ""


def _features(found: re.Match[str], place: _Place) -> str:
    _, got, takes, gives = found.groups()
    if place.layer is not None and not isinstance(place.layer, nn.Linear):
        return f"Use sizes that agree: the first has {got} columns, the second {takes} rows."
    inputs = place.tensors()
    if inputs and inputs[0].dim() == 1:
        return "The input has no batch dimension: keep it by x.flatten(1), not x.flatten() or x.view(-1)."
    if inputs and inputs[0].dim() == 2 and inputs[0].shape[0] == int(takes) and int(got) in _batch_sizes(place):
        return "The batch dimension comes first, and the input is transposed: leave .T out."
    return f"The layer takes {takes} features and gets {got}: nn.Linear({got}, {gives})."


def _batch_sizes(place: _Place) -> set[int]:
    """Return the first sizes of the tensors of the batch."""
    batch = place.batch
    values = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else [batch]
    return {each.shape[0] for each in values if isinstance(each, Tensor) and each.dim()}


def _labels(found: re.Match[str], place: _Place) -> str:
    tensors = place.local("input", "target")
    if tensors is None or tensors[0].dim() == 0:
        return (
            "Labels go from 0 to classes - 1. Use as many outputs as there are classes, and subtract 1 from 1, 2, ..."
        )
    scores, target = tensors
    classes = scores.shape[1 if scores.dim() > 1 else 0]
    seen = ""
    if target.is_cpu and target.numel():
        seen = f", and these are {int(target.min())} to {int(target.max())}"
    return (
        f"The scores have {classes} classes, so labels go from 0 to {classes - 1}{seen}. Give the last layer as many "
        "outputs as there are classes, or subtract 1 from labels that begin with 1; ignore_index=-1 leaves out labels "
        "of -1."
    )


def _indices(_: re.Match[str], place: _Place) -> str:
    tensors = place.local("input", "weight")
    if tensors is None:
        return ""
    indices, weight = tensors
    seen = f", and these are {int(indices.min())} to {int(indices.max())}" if indices.is_cpu else ""
    return (
        f"The embedding has {weight.shape[0]} rows, so indices go from 0 to {weight.shape[0] - 1}{seen}. Make it "
        "nn.Embedding(largest index + 1, ...), or mend the vocabulary."
    )


def _of_labels(found: re.Match[str], place: _Place) -> str:
    tensors = place.local("input", "target")
    if tensors is not None and not tensors[0].is_floating_point():
        return _of_whole_numbers(found, place)
    if tensors is not None and tensors[0].shape == tensors[1].shape and tensors[0].dim() > 1:
        return "Use y.float() for targets that are a probability for each class, or y.argmax(1) for labels of classes."
    if tensors is not None and tensors[1].dim() == 2 and tensors[1].shape[1] == 1:
        return "Use y.squeeze(1): cross_entropy takes scores (batch, classes) and labels (batch,)."
    return "Use y.long() for labels of classes: scores (batch, classes), labels (batch,)."


def _of_whole_numbers(_: re.Match[str], place: _Place) -> str:
    tensors = place.local("input", "target")
    if tensors is None or tensors[0].is_floating_point():
        return "Use .float() for the whole numbers in this line, for instance y.float()."
    if tensors[1].is_floating_point():
        return "The predictions come first, then the labels, and here the two are swapped: loss(scores, labels)."
    return "The predictions are whole numbers, which have no gradient: give the scores, without .argmax()."


def _of_inputs(_: re.Match[str], place: _Place) -> str:
    if (weighed := place.local("input", "target", "weight")) and weighed[2].dtype != weighed[0].dtype:
        return f"Use weight.to(scores.dtype): weight= of the loss is {_dtype(weighed[2])}."
    inputs = place.tensors()
    weight = next(place.layer.parameters(), None) if place.layer is not None else None
    if inputs and weight is not None and weight.dtype in (torch.float16, torch.bfloat16, torch.float64):
        precision = {"float16": "16-true", "bfloat16": "bf16-true", "float64": "64-true"}[_dtype(weight)]
        return (
            f"The layer has weights in {_dtype(weight)}, and x is {_dtype(inputs[0])}: leave .half(), .bfloat16() or "
            f".double() out, and write Trainer(precision={precision!r})."
        )
    if inputs and inputs[0].dtype == torch.uint8:
        return "Use x.float() / 255 in the dataset: images are read as whole numbers."
    if inputs and inputs[0].dtype in (torch.float64, torch.int64, torch.int32):
        return f"Use x.float() in the dataset: layers have 32-bit weights, and x is {_dtype(inputs[0])}."
    return "Use x.to(self.dtype), or x.float() in the dataset."


def _channels(found: re.Match[str], place: _Place) -> str:
    takes, gets = found[2], found[3]
    sizes = [int(size) for size in found[1].split(",")]
    last = f" The last dimension has {takes}: x.permute(0, 3, 1, 2) puts channels before height and width."
    first = f"The layer takes {takes} channels and gets {gets}: "
    name = type(place.layer).__name__ if place.layer is not None else "nn.Conv2d"
    inputs = place.tensors()
    if inputs and inputs[0].dim() < len(sizes) and int(gets) in _batch_sizes(place):
        return f"The input has no dimension for channels: x.unsqueeze(1), for a layer that takes {takes}."
    name = name if name.startswith("nn.") else f"nn.{name}"
    if len(sizes) == 4 and sizes[-1] == int(takes):
        return first.rstrip(": ") + "." + last
    return f"{first}{name}({gets}, ...), or give it the output of a layer with {takes} channels."


def _conv_dims(found: re.Match[str], _: _Place) -> str:
    sizes = found[1].split(",")
    if len(sizes) == 2:
        return "Use x.view(len(x), channels, height, width): the layer takes images, and these are flat rows."
    return "Use x.unsqueeze(1) for images of one channel: the layer takes (batch, channels, height, width)."


def _by_name(_: re.Match[str], place: _Place) -> str:
    batch = place.batch
    if not isinstance(batch, (list, tuple)) or not place.has_batch():
        return ""
    names = ", ".join(["x", "y", "z", "w"][: len(batch)]) if len(batch) <= 4 else "*parts"
    return (
        f"The batch is {with_article(type(batch))} of {len(batch)}, not a dict: write {names} = batch, or batch[0]. "
        "For names let the dataset return a dict."
    )


def _by_index(_: re.Match[str], place: _Place) -> str:
    batch = place.batch
    key = place.error.args[0] if place.error.args else None
    if not isinstance(batch, Mapping) or not place.has_batch() or key in batch:
        return ""
    keys = [str(each) for each in batch]
    known = ", ".join(map(repr, keys[:8])) or "no keys"
    example = f" Write batch[{keys[0]!r}]." if isinstance(key, int) and keys else ""
    return f"The batch is {with_article(type(batch))} with {known}.{example}{did_you_mean(str(key), keys)}"


def _text(place: _Place) -> str:
    if isinstance(place.batch, Mapping) and 0 < len(place.batch) <= 8:
        keys = [str(key) for key in place.batch]
        values = ", ".join(f"batch[{key!r}]" for key in keys)
        return f"Unpacking a dict gives its keys. Write {', '.join(keys)} = {values}."
    return "This is text. Make numbers of it in the dataset or the collate_fn, for instance by a tokenizer."


def _without_loader(place: _Place) -> str:
    """Return what to write where the parts of arrays or of a dataset come in place of batches; "" elsewhere."""
    batch, kinds = place.batch, {"ndarray"}
    values = batch if isinstance(batch, (list, tuple)) else [batch]
    if isinstance(batch, Mapping):
        values, kinds = [*batch.values()], {"ndarray", "list", "int", "float"}
    if kinds.isdisjoint(type(each).__name__ for each in values) or any(isinstance(each, Tensor) for each in values):
        return ""
    return (
        "The batch has no tensors, as if the data itself were given as the loader. Give "
        "DataLoader(TensorDataset(x, y), batch_size=...) with tensors, or "
        "DataLoader(dataset.with_format('torch'), batch_size=...) for a Dataset of Hugging Face."
    )


def _of_lists(_: re.Match[str], place: _Place) -> str:
    if place.batch is not _NO_BATCH and (known := _without_loader(place) or _of_texts(place)):
        return known
    return "This is several tensors: unpack them first, for instance output, state = self.lstm(x)."


def _of_texts(place: _Place) -> str:
    if any(value and all(isinstance(each, str) for each in value) for value in _lists_near(place)):
        return "These labels are text. Give each name a number in the dataset, for instance names.index(label)."
    return ""


def _no_tensor(found: re.Match[str], place: _Place) -> str:
    argument, kind = found.groups()
    if kind == "str":
        return _text(place)
    if known := _without_loader(place):
        return known
    if kind == "numpy":
        return "Leave .numpy() out, or make a tensor of it: torch.from_numpy(x)."
    if kind in ("list", "tuple") and argument.endswith("weight"):
        return f"Make a tensor of it: {argument}=torch.tensor([...], device=self.device)."
    if kind in ("list", "tuple"):
        if known := _of_texts(place):
            return known
        if place.batch is not _NO_BATCH and any(value is place.batch for value in place.inputs):
            return (
                f"This is the whole batch, {describe_batch(place.batch)}: unpack it, x, y = batch. A step gets batch "
                "and batch_idx. Without a predict_step, the batch is given to forward()."
            )
        if argument == "target":
            return (
                "Return the labels of a sample as one tensor from the dataset, torch.tensor(labels); or unpack the "
                f"{kind} here, and compute a loss for each part."
            )
        return f"Give it one tensor: unpack the {kind}, or take its first part."
    if kind == "NoneType":
        return "What it was given is None: a function before it has no return."
    if hasattr(nn, kind):
        return f"This is a layer, not what it computes: make the layer first, then call it: nn.{kind}()(x)."
    return ""


def _lists_near(place: _Place) -> list[Any]:
    """Return the lists and tuples of the batch and of the innermost function of the program."""
    values = [*place.batch] if isinstance(place.batch, (list, tuple)) else []
    for frame in place.frames:
        values += frame.f_locals.values()
    return [value for value in values if isinstance(value, (list, tuple))]


def _before_init(_: re.Match[str], place: _Place) -> str:
    owner = place.frames[-1].f_locals.get("self") if place.frames else None
    return _without_init(type(owner)) if isinstance(owner, nn.Module) else ""


def _without_init(kind: type) -> str:
    """Return the line to add to a class of modules whose ``__init__`` does not begin with that of ``nn.Module``."""
    init = inspect.getattr_static(kind, "__init__")
    file = source_file(init)
    where = f" ({file}, line {init.__code__.co_firstlineno})" if file else ""
    return f"Write super().__init__() as the first line of {kind.__name__}.__init__{where}."


def _none_for_loader(_: re.Match[str], place: _Place) -> str:
    if place.frames and file_of(place.frames[-1]).endswith("collate.py"):
        return "__getitem__ of the dataset returned None for a sample: leave such samples out in a collate_fn."
    if not re.search(r"\btrainer\.\w*dataloaders?\b", place.line()):
        return ""
    return "The Trainer has no loaders yet: self.trainer.estimated_stepping_batches is the number of steps."


_WORKER_ENDED = (
    "Workers read ahead, so it may be a sample of a later batch. num_workers=0 shows its error; if there is none, "
    "memory ran out: use fewer workers, or smaller batches."
)


def _unread(_: re.Match[str], place: _Place) -> str:
    """Explain how a batch ends whose worker ended before the batch was read: torch asks the worker for its memory."""
    asks = any(file_of(frame).endswith("reductions.py") for frame in place.frames)
    return f"A worker process of the DataLoader has ended before its batch was read. {_WORKER_ENDED}" if asks else ""


def _parameters_of_layer(_: re.Match[str], place: _Place) -> str:
    given = place.frames[-1].f_locals.get("params") if place.frames else None
    return "Give the optimizer parameters: write .parameters() after the layer." if isinstance(given, nn.Module) else ""


def _of_groups(_: re.Match[str], place: _Place) -> str:
    of_optimizer = place.frames and file_of(place.frames[-1]).endswith("optimizer.py")
    return "Write each group of parameters as {'params': self.layer.parameters(), 'lr': 1e-3}." if of_optimizer else ""


def _of_none(found: re.Match[str], place: _Place) -> str:
    if re.search(rf"\blr_schedulers\(\)\.{found[1]}\b", place.line()):
        return "self.lr_schedulers() is None: configure_optimizers returned no learning rate scheduler."
    if re.search(rf"\bdatamodule\.{found[1]}\b", place.line()):
        return "trainer.datamodule is None: write trainer.fit(model, datamodule=...)."
    if not re.search(rf"\blogger\.{found[1]}\b", place.line()):
        return ""
    return (
        "The logger is None: the Trainer has logger=False. Write Trainer(logger=True), or trainer.log_dir for a folder "
        "that is there without a logger, or test `if self.logger is not None` first."
    )


def _of_datamodule(owner: object, name: str) -> str:
    """Return where a datamodule should set an attribute that it lacks; "" for another object."""
    kind = type(owner)
    setup, prepare = getattr(kind, "setup", None), getattr(kind, "prepare_data", None)
    if setup is None or prepare is None or not hasattr(kind, "train_dataloader"):
        return ""
    if is_builtin(setup):
        return f"{kind.__name__} has no setup(): write def setup(self, stage), and set self.{name} there."
    if re.search(rf"\.{name}\b[^=\n]*=(?!=)", inspect.getsource(setup)):
        return f"{kind.__name__}.setup() sets self.{name} for other stages only: set it for this one, too."
    own = [each for each in vars(owner) if each != "trainer" and not each.startswith("_")]
    if near := did_you_mean(name, own).strip():
        return near
    if name in names_in(prepare):
        return f"prepare_data() runs in one process of many: set self.{name} in {kind.__name__}.setup()."
    return f"Set self.{name} in {kind.__name__}.setup(), which the Trainer calls before it asks for loaders."


def _index_as_batch(_: re.Match[str], place: _Place) -> str:
    """Return what to write where a line of a step takes the index for the batch; "" elsewhere."""
    for frame, number in zip(place.frames, place.lines, strict=True):
        step, given = name_of(frame), inspect.getargvalues(frame)
        names, local = given.args, given.locals
        if not step.endswith("_step") or len(names) < 3:
            continue
        first, second = names[1:3]
        if local.get(first) is not place.batch or type(local.get(second)) is not int:
            continue
        used = set(re.findall(r"\w+", linecache.getline(file_of(frame), number)))
        if second in used and first not in used:
            named_right = re.search("batch|data|samples", first) or re.search("idx|index", second)
            return (
                f"{step} gets the batch first, then its index: here {second} is {local[second]}, the index. Write "
                + (f"{first} in this line." if named_right else f"def {step}(self, {second}, {first}).")
            )
    return ""


def _misses_init(kind: type, name: str) -> bool:
    """Return whether the ``__init__`` of a class leaves out that of a base, which sets this attribute."""
    own = vars(kind).get("__init__")
    return (
        own is not None
        and "__init__" not in names_in(own)
        and any(
            is_builtin(base) and name in names_in(inspect.unwrap(vars(base).get("__init__", own)))
            for base in kind.__mro__[1:]
        )
    )


# What layers lack, and a LightningModule has.
_LOG_OUTSIDE = "Only a LightningModule logs: return the value from forward, and log it in the step."
_OF_LIGHTNING_MODULES = {
    "log": _LOG_OUTSIDE,
    "log_dict": _LOG_OUTSIDE,
    "device": "Only a LightningModule has a device: write x.device, of a tensor.",
    "freeze": "Write requires_grad_(False), and eval() for layers such as dropout.",
    "unfreeze": "Write requires_grad_(True).",
}


def _attribute(_: re.Match[str], place: _Place) -> str:
    owner, name = getattr(place.error, "obj", None), getattr(place.error, "name", None)
    if not isinstance(name, str):
        return ""
    if not isinstance(owner, nn.Module):
        return _without_init(type(owner)) if _misses_init(type(owner), name) else _of_datamodule(owner, name)
    if "_modules" not in vars(owner):
        return _without_init(type(owner))
    if name in (vars(owner).get("_hparams") or ()):
        return f"Write self.hparams.{name}, or set self.{name} in {type(owner).__name__}.__init__."
    own = [*vars(owner), *owner._modules, *owner._parameters, *owner._buffers, *vars(type(owner))]
    if near := did_you_mean(name, [each for each in own if not each.startswith("_")]).strip():
        return near
    kind = type(owner)
    if name in _OF_LIGHTNING_MODULES:
        return _OF_LIGHTNING_MODULES[name]
    # A class inherits many names, and one of the program's own easily resembles one of them: only close matches count.
    if inherited := get_close_matches(name, [each for each in dir(kind) if not each.startswith("_")], 1, 0.85):
        return f"Did you mean {inherited[0]!r}?"
    if name.startswith("_") or package_of(kind) in {"torch", *ROOTS}:
        return ""
    return f"Nothing has set self.{name} so far: set it in {kind.__name__}.__init__, or define a method of this name."


def _hidden_method(found: re.Match[str], place: _Place) -> str:
    """Return which attribute of a module has taken the place of a method; "" if none has."""
    owner = place.frames[-1].f_locals.get("self") if place.frames else None
    for name in re.findall(r"\bself\.(\w+)\(", place.line()):
        value = getattr(owner, "__dict__", {}).get(name)
        if value is not None and not callable(value) and hasattr(type(owner), name):
            return f"self.{name} is a {found[1]} that hides the method {name}(): give it another name."
    return ""


def _of_property(found: re.Match[str], _: _Place) -> str:
    name = found[1]
    if name == "hparams":
        return "Write self.save_hyperparameters(values): self.hparams has them then."
    return f"The Trainer keeps self.{name}, and a module only reads it: give yours another name."


_UNFREEZE = "Write requires_grad_(True) for the layers to train, or model.unfreeze() for all of a LightningModule."
# What ends the graph of a loss; the second are values of a log, which may be detached.
_ENDS_GRAPH = re.compile(
    r"\.detach\(|\.item\(|no_grad\b|inference_mode\b|argmax\(|\btorch\.tensor\(|\.numpy\(|\.data\b"
)
_LOGS = re.compile(r"^\s*(#|self\.log|print)")


def explain_graph(error: BaseException, module: nn.Module, step: Callable[..., Any]) -> None:
    """Add where the graph of a loss ends, or whose output was changed in place, to an error of its backward."""
    text, note = str(error), ""
    # An explanation that fails must not hide the error.
    with suppress(Exception):
        if "does not require grad" in text:
            note = _end_of_graph(module, step)
        elif "modified by an inplace operation" in text:
            note = _changed_in_place(module, _place_of(error, _NO_BATCH))
    if note:
        error.add_note(note)


def _end_of_graph(module: nn.Module, step: Callable[..., Any]) -> str:
    if not any(parameter.requires_grad for parameter in module.parameters()):
        return f"Here every parameter of {type(module).__name__} has requires_grad=False. {_UNFREEZE}"
    for function in functions_reached([step], lambda name: getattr(module, name, None), depth=2):
        lines, first = inspect.getsourcelines(function)
        for number, line in enumerate(lines, first):
            if _ENDS_GRAPH.search(line) and not _LOGS.match(line):
                return f"Look at line {number} of {source_file(function)}: {line.strip()}"
    return ""


def _changed_in_place(module: nn.Module, place: _Place) -> str:
    """Name the layer whose output was changed: the nearest parameters before the operation that kept it."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    (loss,) = place.local("loss") or place.local("self") or (None,)
    for node in _nodes(getattr(loss, "grad_fn", None)):
        if not _keeps_changed(node):
            continue
        operation = node.name().removesuffix("0").removesuffix("Backward")
        before = (names.get(id(getattr(each, "variable", None))) for each in _nodes(node))
        layer = next((name.rpartition(".")[0] for name in before if name), "")
        where = f" in or after the layer {layer}" if layer else ""
        return f"Changed was a tensor that {operation} keeps for its gradient{where}."
    return ""


def _nodes(first: Any) -> Iterator[Any]:
    """Yield a node of a graph of autograd and those before it, the nearest first."""
    waiting, seen = [first], {first}
    for node in waiting:
        if node is None:
            continue
        yield node
        later = [each for each, _ in node.next_functions if each not in seen]
        seen.update(later)
        waiting += later


def _keeps_changed(node: Any) -> bool:
    for name in dir(node):
        if name.startswith("_saved_"):
            try:
                getattr(node, name)
            except RuntimeError as error:
                if "modified by an inplace operation" in str(error):
                    return True
    return False


def _of_graph(_: re.Match[str], __: _Place) -> str:
    if not torch.is_grad_enabled():
        return (
            "Evaluation computes no gradients. Write `with torch.enable_grad():` around what needs them, and "
            "Trainer(inference_mode=False)."
        )
    if torch.is_inference_mode_enabled():
        return "The program calls fit in torch.inference_mode(): call it outside."
    return (
        "The loss does not depend on any parameter that requires a gradient. Usual causes: .detach(), .item(), "
        "torch.no_grad(), torch.tensor(loss), .argmax() or ==, or every parameter is frozen."
    )


def _no_parameters(_: re.Match[str], place: _Place) -> str:
    owners = [owner for frame in place.frames if (owner := _module_of(frame)) is not None]
    parameters = list(owners[0].parameters()) if owners else []
    if not parameters:
        return "Make the layers in __init__ or configure_model, as attributes or in an nn.ModuleList, not in a list."
    if not any(parameter.requires_grad for parameter in parameters):
        return f"Every parameter of {type(owners[0]).__name__} has requires_grad=False. {_UNFREEZE}"
    return "self.parameters() can be read only once: call it again, or keep list(self.parameters())."


def _pads(_: re.Match[str], place: _Place) -> str:
    if any(frame.f_globals.get("__name__", "").startswith("transformers.") for frame in place.frames):
        return "Give processing_class=tokenizer, or data_collator=DataCollatorWithPadding(tokenizer), which pad them."
    return (
        "Write DataLoader(..., collate_fn=...), with a function that pads them, for instance "
        "torch.nn.utils.rnn.pad_sequence."
    )


def _truth(_: re.Match[str], place: _Place) -> str:
    for frame in place.frames:
        if isinstance(made := made_in(frame), nn.modules.loss._Loss):
            kind = type(made).__name__
            return f"nn.{kind}(...) makes the function of the loss: write nn.{kind}()(predictions, targets)."
    return "A tensor of several elements is neither true nor false: write .any(), .all(), or `is not None`."


def _of_optimizers(_: re.Match[str], place: _Place) -> str:
    if getattr(place.error, "obj", None) == []:
        return "The list is empty: configure_optimizers returned none."
    return (
        "self.optimizers() and self.lr_schedulers() return a list where there are several: "
        "first, second = self.optimizers()."
    )


def _dimension(found: re.Match[str], _: _Place) -> str:
    last = int(found[1])
    return f"The tensor has {last + 1} dimension{'s' * (last > 0)}: the last one is dim={last}, or dim=-1."


def _unpack(found: re.Match[str], place: _Place) -> str:
    batch = place.batch
    expected = int(found[1])
    if re.search(r"\.(shape|size\(\))", place.line()):
        return f"The tensor does not have {expected} dimensions. Print its shape above this line."
    if batch is _NO_BATCH or (isinstance(batch, (list, tuple)) and len(batch) == expected):
        return ""
    if isinstance(batch, Tensor):
        return (
            "The batch is one tensor, and the step unpacks it along its first dimension: use it as it is. If the "
            "loader is a tensor, give fit DataLoader(TensorDataset(x, y), batch_size=...)."
        )
    if isinstance(batch, Mapping):
        return _text(place)
    if not isinstance(batch, (list, tuple)):
        return _without_loader(place)
    if len(batch) > 1 and all(isinstance(each, (list, tuple)) and len(each) == expected for each in batch):
        return (
            f"The batch is a list of {len(batch)} samples: stack them in the collate_fn, as "
            "torch.utils.data.default_collate does."
        )
    names = ", ".join(["x", "y", "z", "w"][: len(batch)]) if 1 < len(batch) <= 4 else "x," if batch else "*parts"
    return (
        "The step unpacks the batch into another number of parts than the dataset gives: "
        f"{expected} instead of {len(batch)}. The batch is a {describe_batch(batch)}. Write {names} = batch, or return "
        f"{expected} values from the dataset's __getitem__."
    )


def _broadcast(found: re.Match[str], place: _Place) -> str:
    tensors = place.local("input", "target")
    if tensors is not None:
        sizes = " and ".join(str(tuple(each.shape)) for each in tensors)
        return f"Give prediction and target one shape, for instance by .squeeze(1) or .unsqueeze(1): {sizes}."
    return f"Use shapes that agree in dimension {found[3]}: sizes {found[1]} and {found[2]}."


def _features_of_norm(found: re.Match[str], place: _Place) -> str:
    kind = type(place.layer).__name__ if place.layer is not None else "BatchNorm"
    return f"The layer was made for {found[2]} channels and gets {found[1]}: nn.{kind}({found[1]})."


def _last_dimension(found: re.Match[str], place: _Place) -> str:
    kind = f"nn.{type(place.layer).__name__}" if place.layer is not None else "the layer"
    return f"The layer takes {found[1]} features and gets {found[2]}: {kind}({found[2]}, ...)."


def _sparse_gradients(_: re.Match[str], place: _Place) -> str:
    models = (one.f_locals.get("module") for one in place.frames)
    model = next((one for one in models if isinstance(one, nn.Module)), nn.Module())
    names = [name for name, one in model.named_parameters() if one.grad is not None and one.grad.is_sparse]
    return (
        f"The gradient of {', '.join(names) or 'a parameter'} is sparse, and a fused step takes none. Leave "
        "F.embedding(sparse=True) out, or Trainer(fused_optimizer=True), or fused=True of the optimizer."
    )


def _with_torch_func(_: re.Match[str], place: _Place) -> str:
    if not any(frame.f_globals.get("__name__") == "hasten.memory" for frame in place.frames):
        return "Use torch.autograd.grad: torch.func takes no module whose activations are recomputed or moved."
    return (
        "Leave memory=... out: torch.func cannot differentiate blocks that are recomputed. torch.autograd.grad can, "
        "with memory='full'."
    )


_MEMORY_OF_LAST = (
    "The loss reaches back into an earlier batch. Detach what you carry over: `self.state = state.detach()`. Or the "
    "step calls loss.backward(): leave that to the Trainer, or set self.automatic_optimization = False."
)
_ON_ONE_DEVICE = "Make tensors with device=self.device, and keep them by self.register_buffer(name, tensor)."
_ANY = (Exception,)
# In order: a part of the message, kinds of errors, and the line to write or a function that makes it.
_REMEDIES: tuple[tuple[str, tuple[type[BaseException], ...], str | _Remedy], ...] = (
    # Shapes.
    (r"mat1 and mat2 shapes cannot be multiplied \((\d+)x(\d+) and (\d+)x(\d+)\)", _ANY, _features),
    (r"expected input\[([\d, ]+)\] to have (\d+) channels, but got (\d+) channels", _ANY, _channels),
    (r"Expected \dD \(unbatched\) or \dD \(batched\) input to conv\dd, but got input of size: \[([\d, ]+)\]", _ANY,
     _conv_dims),
    (r"running_mean should contain (\d+) elements not (\d+)", _ANY, _features_of_norm),
    (r"Given normalized_shape=\[(\d+)\], expected input with shape .* of size\[(?:\d+, )*(\d+)\]", _ANY,
     lambda m, _: f"The layer takes {m[1]} features and gets {m[2]}: nn.LayerNorm({m[2]})."),
    (r"(?:cannot find|library not found for) -ltorch\b", _ANY,
     "torch.compile finds no libraries in a path with a space: if that of the virtual environment has one, make it "
     "elsewhere."),
    (r"must be equal to input_size. Expected (\d+), got (\d+)", _ANY, _last_dimension),
    (r"was expecting embedding dimension of (\d+), but got (\d+)", _ANY, _last_dimension),
    (r"Expected more than 1 value per channel", _ANY,
     "DataLoader(..., drop_last=True), or a larger batch_size or micro_batch"),
    (r"Dimension out of range \(expected to be in range of \[-\d+, (\d+)\]", (IndexError,), _dimension),
    (r"preds\.shape\[1\]` should be equal to number of classes", (ValueError,),
     "Make the metric with num_classes equal to the number of scores: preds.shape[1]."),
    (r"key_padd(?:ed|ing)_mask\.shape", (AssertionError,),
     "key_padding_mask is (batch, tokens), and inputs are (batch, tokens, features) with batch_first=True."),
    (r"shape '\[([-\d, ]+)\]' is invalid for input of size (\d+)", _ANY,
     lambda m, _: f"The tensor has {m[2]} elements, which do not fill [{m[1]}]. Use x.flatten(1) to keep the batch "
     "dimension, or -1 for one of the sizes."),
    (r"Expected input batch_size \((\d+)\) to match target batch_size \((\d+)\)", _ANY,
     lambda m, _: f"Keep the batch dimension, {m[1]} scores for {m[2]} labels: x.flatten(1), not x.flatten()."),
    (r"Expected target size \[1, ", _ANY,
     "The batch has one sample. If the loader has sampler=BatchSampler(...), pass it as batch_sampler=; if not, give "
     "classes in dimension 1 to cross_entropy: scores.transpose(1, 2)."),
    (r"Expected target size \[", _ANY,
     "cross_entropy takes classes in dimension 1. Use scores.transpose(1, 2), or scores.flatten(0, 1) and "
     "labels.flatten()."),
    (r"[Tt]arget size \(torch.Size\((.*?)\)\).* input size \(torch.Size\((.*?)\)\)", _ANY,
     lambda m, _: f"Give both one shape, for instance by .squeeze(1) or .unsqueeze(1): {m[2]} and {m[1]}."),
    (r"The size of tensor a \((\d+)\) must match the size of tensor b \((\d+)\) at .*dimension (\d+)", _ANY,
     _broadcast),
    (r"Output size is too small|Kernel size can't be greater than actual input size", _ANY,
     "Use larger images, a smaller kernel, padding, or fewer pooling layers: nothing is left of the image here."),
    # Types of numbers.
    (r"[Ee]xpected target dtype to be Long|for target with class probabilities|multi-target not supported|"
     r"expected scalar type Long", _ANY, _of_labels),
    (r"argument #1 'indices'", _ANY, "Use x.long(): an embedding takes whole numbers."),
    (r"could not infer output dtype.* Got: Bool", _ANY, "Write .float() before the mean: (a == b).float().mean()."),
    (r"not implemented for '(?:Long|Int|Byte|Bool)'|can't be cast to the desired output type Long|"
     r"could not infer output dtype|dtype (?:Long|Int) but expected Float", _ANY, _of_whole_numbers),
    (r"Double and Float|Float and Double|found Double|DoubleTensor|\(double\)|unsigned char|Byte and Float|"
     r"Long and Float|\(long", _ANY, _of_inputs),
    (r"expected scalar type|must have the same dtype|should be the same", _ANY, _of_inputs),
    (r"all elements of input should be between 0 and 1", _ANY,
     "Use binary_cross_entropy_with_logits, or torch.sigmoid before the loss."),
    # Labels and indices.
    (r"Target -?\d+ is out of bounds", (IndexError, RuntimeError), _labels),
    (r"index out of range in self", (IndexError,), _indices),
    (r"device-side assert", _ANY,
     "Usual causes: a label or an index of an embedding is too large. Run a batch with accelerator='cpu': the message "
     "there names it."),
    # The batch.
    (r"(?:list|tuple) indices must be integers or slices, not str", (TypeError,), _by_name),
    (r"new\(\): invalid data type 'str'", (TypeError,),
     lambda _, place: "The batch is one tensor: use it as it is, or let the dataset return a tuple or a dict."
     if isinstance(place.batch, Tensor) and place.has_batch() else ""),
    (r"^'params'$", (KeyError,), _of_groups),
    (r"", (KeyError,), _by_index),
    (r"unhashable type: 'slice'", (TypeError, KeyError), _by_index),
    (r"iteration over a 0-d tensor", (TypeError,),
     lambda _, place: "The batch is one number: batches are the rows of what the Trainer was given. Give "
     "DataLoader(TensorDataset(x, y), batch_size=32)." if isinstance(place.batch, Tensor) else ""),
    (r"non-iterable int\b|'int' object|\bnot int\b", (TypeError, AttributeError), _index_as_batch),
    (r"values to unpack \(expected (\d+)", (ValueError,), _unpack),
    (r"cannot unpack non-iterable (\w*Optimizer) object", (TypeError,),
     "self.optimizers() returns the optimizer itself where there is one: optimizer = self.optimizers()."),
    (r"cannot unpack non-iterable (\w+) object", (TypeError,),
     lambda m, _: f"Give a tuple there: what the line unpacks is of type {m[1]}."),
    (r"\blog\(\) missing 1 required positional argument: 'value'", (TypeError,),
     "Write self.log(name, value), or self.log_dict(values) for a dict."),
    (r"'(\w+)' object is not callable", (TypeError,), _hidden_method),
    (r"property '(\w+)' of '.*' object has no setter", (AttributeError,), _of_property),
    (r"'str' object has no attribute", (AttributeError,),
     lambda _, place: _text(place) if hasattr(Tensor, getattr(place.error, "name", None) or "") else ""),
    (r"argument '(\w+)' \(position \d\) must be Tensor, not (\w+)", (TypeError,), _no_tensor),
    (r"()invalid combination of arguments - got \((list|tuple|str|NoneType)\b", (TypeError,), _no_tensor),
    (r"Boolean value of Tensor with more than one value", (RuntimeError,), _truth),
    (r"'(?:tuple|list)' object has no attribute '(?:shape|size|float|to|view|dim|device|mean|flatten|dtype)'",
     (AttributeError,), _of_lists),
    (r"cannot assign \w+ before Module.__init__\(\) call", (AttributeError,), _before_init),
    (r"'list' object has no attribute '(?:zero_grad|step|param_groups)'", (AttributeError,), _of_optimizers),
    (r"'NoneType' object has no attribute '(\w+)'", (AttributeError,), _of_none),
    (r"object has no attribute", (AttributeError,), _attribute),
    (r"object of type 'NoneType' has no len\(\)|'NoneType' object is not iterable", (TypeError,), _none_for_loader),
    (r"object of type '((?!NoneType)\w+)' has no len\(\)", (TypeError,),
     lambda m, _: f"Define __len__ in {m[1]}, the number of samples; or make it an IterableDataset with __iter__."),
    (r"'(\w+)' object is not iterable", (TypeError,), _parameters_of_layer),
    (r"optimizer can only optimize Tensors, but one of the params is (?:str|torch\.nn\.modules)", (TypeError,),
     "Give it .parameters(), not layers or state_dict()."),
    (r"Expected positive integer total_steps, but got (?:inf|-1)", (ValueError,),
     "The number of steps is not known: write Trainer(max_steps=...), or limit_train_batches=... for a stream, and "
     "total_steps=self.trainer.estimated_stepping_batches."),
    (r"'method' object is not iterable", (TypeError,), "Call the method: self.parameters(), with brackets."),
    (r"not supported between instances of '(?:str' and '(?:float|int)|(?:float|int)' and 'str)'", (TypeError,),
     "One of the two is text. Write a number: lr=1e-3, not lr='1e-3'; in YAML 1.0e-3."),
    (r"unsupported ScalarType BFloat16", (TypeError,), "Write .float() before .numpy(), which has no bfloat16."),
    # Gradients.
    (r"does not require grad|requires_grad=True on inference tensor", _ANY, _of_graph),
    (r"optimizer got an empty parameter list", (ValueError,), _no_parameters),
    (r"implicitly created only for scalar", _ANY,
     "The loss has more than one element. Take its mean: loss.mean()."),
    (r"a second time", _ANY, _MEMORY_OF_LAST),
    (r"modified by an inplace operation", _ANY,
     "Write x = x + y in place of x += y, and no .add_(), relu_() or x[...] = on what a layer has computed; "
     "Trainer(detect_anomaly=True) shows the line."),
    (r"a (?:view of a )?leaf Variable that requires grad is being used in an in-place", _ANY,
     "Write it within `with torch.no_grad():`, or make a new tensor: w = w + 1."),
    (r"activation checkpoint has been mutated", _ANY,
     "memory='selective' keeps the results of products and attention, and a block changes one in place. Use "
     "memory='full', or write x = x + y instead of x += y there."),
    (r"Trying to backward an extra time", _ANY,
     "memory='selective' gives each block one backward, and create_graph=True and retain_graph=True need a second. Use "
     "memory='full'."),
    (r"don't yet support saved tensor hooks", _ANY, _with_torch_func),
    (r"compiled with non-empty donated buffers|does not currently support double backward", _ANY,
     "Leave compile=... out: compiled code has one backward, and create_graph=True and retain_graph=True need "
     "a second."),
    (r"_fused_(\w+)` does not support sparse gradients|sparse gradients?.*fused|fused.*sparse gradient", _ANY,
     _sparse_gradients),
    (r"exactly one param_group|^$", (AssertionError,),
     lambda m, place: "Give LBFGS all parameters in configure_optimizers: it takes no second group, and leaves those "
     "without gradients as they are." if m[0] or "len(self.param_groups)" in place.line() else ""),
    (r"must support momentum or beta1 with `cycle_momentum`", (ValueError,),
     "Write cycle_momentum=False in OneCycleLR or CyclicLR: this optimizer has no momentum."),
    # Devices.
    (r"not compiled with CUDA enabled", _ANY,
     "Leave .cuda() and device='cuda' out: batch and module are on the device of the run. For tensors of your own: "
     "device=self.device."),
    (r"on the same device|on different devices|not on the expected device", _ANY, _ON_ONE_DEVICE),
    (r"Input type \(torch\.cuda\.\w+\) and weight type \(torch\.\w+\)|to numpy. Use Tensor.cpu\(\)", _ANY,
     _ON_ONE_DEVICE),
    # Loaders.
    (r"stack expects each tensor to be equal size|each element in list of batch should be of equal size|"
     r"resize storage that is not resizable", _ANY,
     _pads),
    (r"vars\(\) argument must have __dict__", (TypeError,),
     "Samples must be dicts, such as {'input_ids': ..., 'labels': ...}; or give a data_collator that makes one."),
    (r"expected sequence of length \d+ at dim \d+", _ANY,
     "The rows have several lengths: pad them. TransformersTrainer(processing_class=tokenizer) does, and so does "
     "data_collator=DataCollatorWithPadding(tokenizer)."),
    (r"Unable to create tensor, you should probably activate .*`labels`", _ANY,
     "This collator pads no labels. DataCollatorForSeq2Seq(tokenizer) pads them, and "
     "DataCollatorForLanguageModeling(tokenizer, mlm=False) makes them of the texts."),
    (r"default_collate: batch must contain .* found <class '([\w.]+)'>", (TypeError,),
     lambda m, _: f"Return tensors, numbers, dicts or tuples from __getitem__, not {m[1]}, or pass a collate_fn."),
    (r"DataLoader worker .*(?:exited unexpectedly|is killed)", (RuntimeError,), _WORKER_ENDED),
    (r"", (ConnectionError, EOFError, FileNotFoundError), _unread),
    (r"start_method=", (TypeError,), ""),
    (r"[Cc]an't (?:pickle|get local object).*(?:lambda|<locals>)|attribute lookup .*<lambda>", _ANY,
     "Define it by def at the top of a file, not as a lambda or inside a function: worker processes get the dataset, "
     "transforms and collate_fn by pickle. DataLoader(num_workers=0) needs none."),
    (r"", (StopIteration,),
     "next() has found nothing more: give it a default, begin its iterator again by iter(...), or give fit both "
     "loaders in a CombinedLoader."),
    # Methods.
    (r"forward", (NotImplementedError,), "Define forward(), or call the layers by name in the step."),
)  # fmt: skip

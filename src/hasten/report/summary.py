"""Tables: the layers of a model with their parameters and sizes, and the results of validate and test."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TextIO

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from hasten._lib import check
from hasten._lib.lazy import attach
from hasten._lib.rank_zero import rank_zero_warn
from hasten._lib.tree import map_tensors, preserve_modes
from hasten.elsewhere import conventions
from hasten.module.module import trainer_of
from hasten.report.peaks import flop_counter
from hasten.report.tables import aligned
from hasten.seed import isolate_rng

if TYPE_CHECKING:
    from torch.utils.flop_counter import FlopCounterMode

    from hasten.types import Batch
    from hasten_deepspeed.summary import DeepSpeedSummary as DeepSpeedSummary

UNKNOWN_SIZE = "?"
NOT_APPLICABLE = "n/a"
LEFTOVER_PARAMS_NAME = "other params"


class LayerSummary:
    """One layer: its type, parameters, mode, and the shapes it sees in its first forward pass.

    Args:
        module: the layer. A hook on it waits for a forward pass; ``detach_hook`` removes it.

    Attributes:
        in_size: shape of the input, "?" if unknown.
        out_size: shape of the output, "?" if unknown.

    Example::

        >>> layer = LayerSummary(nn.Linear(4, 2))
        >>> layer.layer_type, layer.num_parameters
        ('Linear', 10)

    """

    in_size: Any = UNKNOWN_SIZE
    out_size: Any = UNKNOWN_SIZE

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._handle: Any = None
        if not isinstance(module, torch.jit.ScriptModule):
            self._handle = module.register_forward_hook(self._record_shapes, with_kwargs=True)

    def _record_shapes(self, _: nn.Module, args: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        inputs = (*args, *named.values())
        self.in_size = parse_batch_shape(inputs[0] if len(inputs) == 1 else inputs) or UNKNOWN_SIZE
        self.out_size = parse_batch_shape(output) or UNKNOWN_SIZE
        self.detach_hook()

    def detach_hook(self) -> None:
        """Stop waiting for a forward pass."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):
            self.detach_hook()

    @property
    def layer_type(self) -> str:
        """Name of the layer's class."""
        return type(self._module).__name__

    @property
    def num_parameters(self) -> int:
        """Number of parameters, including nested layers; lazy parameters count when they have a shape."""
        return sum(map(elements_of, _with_shape(self._module.parameters())))

    @property
    def has_lazy_parameters(self) -> bool:
        """Whether some parameters get their shape in the first forward pass."""
        return any(isinstance(parameter, UninitializedParameter) for parameter in self._module.parameters())

    @property
    def training(self) -> bool:
        """Whether the layer is in training mode."""
        return self._module.training


def _of_layers(attribute: str, doc: str) -> Any:
    """Return a property of a table: this attribute of each of its layers, as a list."""
    return property(lambda table: [getattr(layer, attribute) for layer in table._layers.values()], doc=doc)


class LayerTable:
    """The layers of a model as a table; ``print`` it.

    If the model has an ``example_input_array``, a forward pass with it gives the shapes each layer sees.

    Args:
        model: a LightningModule, or any module.
        max_depth: how many levels of nested modules to list; -1 for all, 0 for none.

    Raises:
        ValueError: ``max_depth`` is something else.

    Example::

        >>> print(ModelSummary(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))))
          | Name | Type   | Params | Mode
        ----------------------------------------
        0 | 0    | Linear | 40     | train
        1 | 1    | Linear | 18     | train
        ----------------------------------------
        58        Trainable params
        0         Non-trainable params
        58        Total params
        0.000     Total estimated model params size (MB)
        2         Modules in train mode
        0         Modules in eval mode

    """

    def __init__(self, model: nn.Module, max_depth: int = 1) -> None:
        self._model = model
        self._known: list[Tensor] | None = None
        self._max_depth = check_depth(max_depth)
        self._flops: dict[str, dict[Any, int]] = {}
        self._total_flops = 0
        self._layers = self.summarize()

    @property
    def named_modules(self) -> list[tuple[str, nn.Module]]:
        """The layers that a table of this depth can list, and those below them."""
        if self._max_depth == 0:
            return []
        if self._max_depth == 1:
            return list(self._model.named_children())
        return list(self._model.named_modules())[1:]

    def summarize(self) -> dict[str, LayerSummary]:
        """Return a LayerSummary for each layer in the table, by its name."""
        layers = {name: LayerSummary(module) for name, module in self.named_modules}
        try:
            if self._example is not None:
                self._forward_example()
        finally:
            for layer in layers.values():
                layer.detach_hook()
        if self._max_depth < 1:
            return layers
        return {name: layer for name, layer in layers.items() if name.count(".") < self._max_depth}

    @property
    def layer_names(self) -> list[str]:
        """Names of the layers."""
        return list(self._layers)

    layer_types = _of_layers("layer_type", "Class names of the layers.")
    in_sizes = _of_layers("in_size", "Input shapes of the layers.")
    out_sizes = _of_layers("out_size", "Output shapes of the layers.")
    param_nums = _of_layers("num_parameters", "Numbers of parameters of the layers.")
    training_modes = _of_layers("training", "Whether each layer is in training mode.")

    @property
    def total_training_modes(self) -> dict[str, int]:
        """Number of modules below the root in "train" and in "eval" mode."""
        modes = [module.training for module in self._model.modules()][1:]
        return {"train": modes.count(True), "eval": modes.count(False)}

    @property
    def total_parameters(self) -> int:
        """Number of parameters; shared ones count once."""
        known, are_all = self._parameters()
        if not are_all:
            rank_zero_warn(
                "The total number of parameters detected may be inaccurate because the model contains an instance of "
                "`UninitializedParameter`, which gets its shape in the first forward pass."
            )
        return sum(map(elements_of, known))

    def _parameters(self) -> tuple[list[Tensor], bool]:
        """Return the parameters of the model that have a shape, and whether these are all."""
        if self._known is None:
            parameters = list(self._model.parameters())
            known = _with_shape(parameters)
            if len(known) < len(parameters):
                return known, False
            self._known = known
        return self._known, True

    @property
    def trainable_parameters(self) -> int:
        """Number of parameters that require gradients."""
        return sum([elements_of(p) for p in self._parameters()[0] if p.requires_grad])

    @property
    def flop_counts(self) -> dict[str, dict[Any, int]]:
        """Floating-point operations of each layer, by operation, in the forward pass of the example."""
        return {name: self._flops.get(name, {}) for name in self._layers}

    @property
    def total_flops(self) -> int:
        """Floating-point operations of the forward pass of the example; 0 without one."""
        return self._total_flops

    @property
    def total_layer_params(self) -> int:
        """Number of parameters of the layers in the table."""
        return sum(self.param_nums)

    def sum_by_layer(self, number: Callable[[Tensor], int]) -> list[int]:
        """Return for each layer the sum of a number of its parameters."""
        return [sum(map(number, layer._module.parameters())) for layer in self._layers.values()]

    @property
    def model_size(self) -> float:
        """Size of the parameters in MB (10**6 bytes), in the precision they are in."""
        return sum([elements_of(p) * p.element_size() for p in self._parameters()[0]]) / 1e6

    def columns(self) -> list[tuple[str, list[str]]]:
        """Return the table as columns: heading and cells."""
        layers = list(self._layers.values())
        # A module that is used in several places counts once in the model, and so for "other params".
        listed = {id(p): p for layer in layers for p in layer._module.parameters()}
        leftover = self.total_parameters - sum(map(elements_of, _with_shape(listed.values())))
        params = [
            UNKNOWN_SIZE if layer.has_lazy_parameters else human_readable(layer.num_parameters) for layer in layers
        ]
        columns = [
            (" ", list(map(str, range(len(layers))))),
            ("Name", self.layer_names),
            ("Type", self.layer_types),
            ("Params", params),
            ("Mode", ["train" if training else "eval" for training in self.training_modes]),
        ]
        # Callbacks written for Lightning expect the numbers, which are 0 without an example.
        if self._example is not None or conventions.current().summary_has_flops:
            columns.append(("FLOPs", [human_readable(sum(each.values())) for each in self.flop_counts.values()]))
        if self._example is not None:
            columns.append(("In sizes", list(map(str, self.in_sizes))))
            columns.append(("Out sizes", list(map(str, self.out_sizes))))
        if leftover > 0 and self._max_depth != 0:
            known = {" ": " ", "Name": LEFTOVER_PARAMS_NAME, "Params": human_readable(leftover)}
            for heading, cells in columns:
                cells.append(known.get(heading, NOT_APPLICABLE))
        return columns

    def shown_columns(self) -> list[tuple[str, list[str]]]:
        """Return ``columns()``, or what a subclass written for Lightning shows instead."""
        return self._get_summary_data()

    # -- names that callbacks written for Lightning use

    def _get_summary_data(self) -> list[tuple[str, list[str]]]:
        return self.columns()

    @property
    def _layer_summary(self) -> dict[str, LayerSummary]:
        return self._layers

    def __str__(self) -> str:
        modes, flops = self.total_training_modes, self.total_flops
        below = totals(self.total_parameters, self.trainable_parameters, self.model_size, modes, flops)
        table = format_table(self.shown_columns(), below)
        if any(isinstance(parameter, UninitializedParameter) for parameter in self._model.parameters()):
            table += "\nParameters marked ? get their shape in the first forward pass and are not counted."
        return table

    __repr__ = __str__

    @property
    def _example(self) -> Any:
        return getattr(self._model, "example_input_array", None)

    def _forward_example(self) -> None:
        """Record shapes and operations of a forward pass with the example."""
        model = self._model
        like = next((p for p in _with_shape(model.parameters()) if p.is_floating_point()), torch.zeros(()))
        if like.is_meta:
            return  # nothing can be computed there
        example = map_tensors(
            lambda tensor: tensor.to(like if tensor.is_floating_point() else like.device), self._example
        )
        if isinstance(example, dict):
            args, named = (), example
        else:
            args, named = tuple(example) if isinstance(example, (list, tuple)) else (example,), {}
        trainer = trainer_of(model)

        def forward(counter: FlopCounterMode, *, gradients: bool) -> None:
            autocast = contextlib.nullcontext() if trainer is None else trainer.runtime.autocast()
            # Dropout and the like must not draw from the run's random numbers.
            with preserve_modes(model), isolate_rng(), torch.set_grad_enabled(gradients), autocast, counter:
                model.eval()(*args, **named)

        counter = flop_counter(by_module=True)
        try:
            forward(counter, gradients=False)
        except Exception as error:
            # A forward that takes derivatives by itself needs them, and no hooks: its layers have no count then.
            counter = flop_counter()
            try:
                forward(counter, gradients=True)
            except Exception:
                error.add_note(
                    f"This was the forward pass of {type(model).__name__} with its example_input_array, for the table "
                    "of layers. Correct example_input_array, or set it to None."
                )
                raise error from None
        counts = counter.get_flop_counts()
        for name, _ in model.named_modules():
            self._flops[name] = dict(counts.get(f"{type(model).__name__}.{name}", {}))
        self._total_flops = counter.get_total_flops()


# The name that programs import; the callback of this name is in hasten.callbacks.
ModelSummary = LayerTable


def summarize(lightning_module: nn.Module, max_depth: int = 1) -> ModelSummary:
    """Return the summary of a module.

    Args:
        lightning_module: the module.
        max_depth: how many levels of nested modules to list; -1 for all, 0 for none.

    Example::

        >>> summarize(nn.Linear(4, 2)).total_parameters
        10

    """
    return ModelSummary(lightning_module, max_depth=max_depth)


def format_table(columns: list[tuple[str, list[str]]], below: list[tuple[str, str]]) -> str:
    """Return columns (heading and cells), and below them numbers and what they count, as one text."""
    texts = [[heading, *cells] for heading, cells in columns]
    headings, *rows = aligned(list(zip(*texts, strict=True)), gap=" | ")
    rule = "-" * (sum(max(map(len, column)) for column in texts) + 3 * (len(columns) + 1))
    return "\n".join([headings, rule, *rows, rule, *aligned(below, [10, 0])])


def totals(
    total_parameters: int,
    trainable_parameters: int,
    model_size: float,
    total_training_modes: dict[str, int],
    total_flops: int = 0,
) -> list[tuple[str, str]]:
    """Return the lines below the table: numbers and what they count."""
    return [
        (human_readable(trainable_parameters), "Trainable params"),
        (human_readable(total_parameters - trainable_parameters), "Non-trainable params"),
        (human_readable(total_parameters), "Total params"),
        (f"{model_size:,.3f}", "Total estimated model params size (MB)"),
        (str(total_training_modes["train"]), "Modules in train mode"),
        (str(total_training_modes["eval"]), "Modules in eval mode"),
        *([(human_readable(total_flops), "Total FLOPs (forward of the example)")] if total_flops else []),
    ]


def print_results(results: list[dict[str, float]], stage: str, file: TextIO | None = None) -> None:
    """Print a table of the values of each loader, in standard output by default, for "validate" or "test", its heading.

    Example::

        >>> print_results([{"test_acc": 0.91}], "test")
        Test metric    value
        -----------  -------
        test_acc      0.9100

    """
    out = sys.stdout if file is None else file
    for index, values in enumerate(results):
        if not values:
            continue
        heading = f"{stage.capitalize()} metric" + (f" (loader {index})" if len(results) > 1 else "")
        rows = [(name, _shown(value)) for name, value in sorted(values.items())]
        room = max(20, shutil.get_terminal_size((100, 24)).columns - 16)
        left = min(room, max(len(heading), *(len(name) for name, _ in rows)))
        right = max(7, *(len(value) for _, value in rows))
        table = [(heading, "value"), ("-" * left, "-" * right), *rows]
        print(*aligned(table, [left, right], right_from=1, gap="  "), sep="\n", file=out)


def _shown(value: float) -> str:
    if value != value or value in (float("inf"), float("-inf")) or float(value).is_integer():
        return str(value)
    return f"{value:.4f}" if abs(value) >= 1e-3 else f"{value:.4e}"


def human_readable(number: int) -> str:
    """Return a count with a unit: K, M, B, T for 10**3, 10**6, 10**9, 10**12.

    Example::

        >>> human_readable(123), human_readable(1234), human_readable(66_400_000)
        ('123', '1.2 K', '66.4 M')

    """
    if number < 1000:
        return str(number)
    power = next((power for power in (1, 2, 3) if round(number / 1000**power, 1) < 1000), 4)
    value, unit = number / 1000**power, "KMBT"[power - 1]
    return f"{value:,.1f} {unit}" if value < 100 else f"{value:,.0f} {unit}"


def parse_batch_shape(batch: Batch) -> object:
    """Return the shape of a tensor as a list, or a list of shapes; "?" for anything else.

    Example::

        >>> parse_batch_shape((torch.zeros(2, 3), "text"))
        [[2, 3], '?']

    """
    if hasattr(batch, "shape"):
        return list(batch.shape)
    if isinstance(batch, (list, tuple)):
        return [parse_batch_shape(item) for item in batch]
    return UNKNOWN_SIZE


def check_depth(max_depth: int) -> int:
    """Return ``max_depth`` if it is -1, 0 or positive."""
    allowed = "-1 for all levels, 0 for none, or a positive number"
    return check.whole("ModelSummary", "max_depth", max_depth, at_least=-1, allowed=allowed, error=ValueError)


def elements_of(parameter: Tensor) -> int:
    """Return the number of elements of a whole parameter; ``ds_numel``, where an engine has divided it in place."""
    elements: int = getattr(parameter, "ds_numel", parameter.numel())
    return elements


def _with_shape(parameters: Iterable[Tensor]) -> list[Tensor]:
    return [parameter for parameter in parameters if not isinstance(parameter, UninitializedParameter)]


# The class of a backend is imported when it is used; ``extend.moved`` says where its module is.
__getattr__ = attach(__name__, {"hasten.report.deepspeed": "DeepSpeedSummary"})[0]

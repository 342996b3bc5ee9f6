"""Verify on the first batch, before any weight changes, that packing does not change a model.

The class of a block does not reveal whether it computes each token separately: it may have a convolution or mean over
tokens, batch statistics, or stochastic depth of whole samples. So a few samples of the first training batch are
computed in four ways, without gradients, and compared:

- padded;
- packed: each block must call the packed attention, and its output for each real token must be equal;
- packed, with one sample of nan, which spreads to everything computed from it, even through zero weights: it must not
  reach other samples;
- if requested, with the last block computed for first tokens only.

Random draws are replaced by constants, and their number must be a multiple of the number of tokens: any other number is
a draw per sample, which one row of tokens does not have. Random generators, buffers, attributes of modules and the
state of hooks are restored.
"""

from __future__ import annotations

import inspect
import random
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import chain, pairwise, repeat, zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hasten._lib import torch_private
from hasten._lib.device import is_out_of_memory
from hasten._lib.errors import MisconfigurationException
from hasten.checkpoint.snapshots import Snapshot
from hasten.extend.origin import package_of
from hasten.packed.layout import Layout, refusal
from hasten.packed.patches import HookPatch, MethodPatch
from hasten.packed.stack import Probe, Stack, is_of_user
from hasten.seed import isolate_rng

# Tolerated rounding over many blocks, relative to the norm of a sample's output.
_TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-3}
_LOW_PRECISION = 0.1
# Arguments whose first dimension is not the batch.
_NOT_BY_SAMPLE = frozenset({"mask", "cache_position"})

Named = dict[str, Any]
Forward = Callable[..., Any]
Layouts = Callable[[Named], Layout]
_OF_MODULES = frozenset(vars(nn.Module()))


@contextmanager
def packing(
    model: nn.Module, stack: Stack, begin: Callable[[Named], Layout | None], layout: Layouts
) -> Iterator[ExitStack]:
    """Pack the calls of a model inside the block; yields a stack for further changes to undo at its end.

    ``begin`` is called with the arguments of each call by name, and returns which tokens are real, or None to compute
    it padded; ``layout`` does so in trial calls.
    """
    signature = inspect.signature(model.forward)

    def before(_: nn.Module, args: Any, kwargs: Any) -> None:
        stack.begin(begin(dict(signature.bind_partial(*args, **kwargs).arguments)))

    def after(_: nn.Module, args: Any, output: Any) -> None:
        stack.finish(output)

    with ExitStack() as changed:
        changed.callback(model.register_forward_pre_hook(HookPatch(before), with_kwargs=True).remove)
        changed.callback(model.register_forward_hook(HookPatch(after), always_call=True).remove)
        changed.enter_context(_Verified(model, stack, signature, layout).applied())
        changed.enter_context(stack.packing())
        yield changed


class _Verified(MethodPatch):
    """Replaces the forward of a packed model: the first call, and the first after changes, starts with ``verify``."""

    def __init__(self, model: nn.Module, stack: Stack, signature: inspect.Signature, layout: Layouts) -> None:
        super().__init__(model)
        self._stack, self._layout = stack, layout
        # For code that inspects the signature.
        self.__signature__ = signature

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        stack, call = self._stack, self._stack.call
        if not stack.verified and call is not None and call.layout is not None:
            given = _Arguments(args, kwargs, self.__signature__)
            stack.verified = verify(self.module, self.original, stack, given, self._layout)
            stack.begin(call.layout)
        return self.original(*args, **kwargs)


class _Arguments(NamedTuple):
    """The positional and keyword arguments of a call: some code depends on how an argument is passed."""

    args: tuple[Any, ...]
    kwargs: Named
    signature: inspect.Signature

    def named(self) -> Named:
        """Return all arguments by name."""
        return dict(self.signature.bind_partial(*self.args, **self.kwargs).arguments)

    def of_samples(self, places: list[int], samples: int) -> _Arguments:
        """Return the arguments for the samples at ``places``, which may repeat, of a batch of ``samples``."""

        def some(name: str, value: Any) -> Any:
            by_sample = isinstance(value, Tensor) and value.dim() > 0 and name not in _NOT_BY_SAMPLE
            if not by_sample or value.shape[0] != samples:
                return value
            return value.detach()[torch.tensor(places, device=value.device)]

        names = chain(self.signature.parameters, repeat(""))
        args = tuple(map(some, names, self.args))
        kwargs = {name: some(name, each) for name, each in self.kwargs.items()}
        return self._replace(args=args, kwargs=kwargs)


def verify(model: nn.Module, forward: Forward, stack: Stack, given: _Arguments, layout: Layouts) -> bool:
    """Compare a few samples of a batch, given the arguments of the model's forward, packed and padded.

    Return False if nothing could be compared: the batch has no real token, or its outputs are not finite.

    Raises:
        MisconfigurationException: packing would change the outputs; the message names the block and the reason.

    """
    lengths = layout(given.named()).bounds.diff().tolist()
    chosen = _chosen(lengths)
    if not chosen:
        return False
    trial = partial(_trial, stack, forward, layout)
    with _restored(model), _ConstantDraws(stack):
        few, again = (given.of_samples(each, len(lengths)) for each in (chosen, [chosen[0], *chosen]))
        try:
            padded = trial(few, packed=False)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            # The arguments cannot be indexed by sample, so take all samples.
            few = again = given
            padded = trial(few, packed=False)
        packed = _or_refused(stack, lambda: trial(few, packed=True))
        if packed.idle:
            raise refusal(stack.asked, _own_attention(stack, packed.idle[0]))
        if not all(bool(output.isfinite().all()) for _, output in packed.outputs):
            return False
        scaled = _scales_whole_tensors(model)
        tainted = _or_failed(lambda: trial(again, packed=True, tainted=not scaled))
        for problem in _differences(stack, padded, packed, tainted, _LOW_PRECISION if scaled else None):
            raise refusal(stack.asked, problem)
        if stack.first is not None:
            first = _or_refused(stack, lambda: trial(few, packed=True, first_only=True))
            _check_first_tokens(stack, packed, first)
    return True


def _or_failed(call: Callable[[], Probe]) -> Probe | Exception:
    """Return the result of a call, or its error; refusals and a lack of memory are raised."""
    try:
        return call()
    except Exception as error:
        if isinstance(error, MisconfigurationException) or is_out_of_memory(error):
            raise
        return error


def _or_refused(stack: Stack, call: Callable[[], Probe]) -> Probe:
    found = _or_failed(call)
    if isinstance(found, Exception):
        text = f"{type(found).__name__}: {str(found).partition(chr(10))[0]:.120}"
        problem = f"its blocks fail on a row of real tokens ({text}), but not on the padded batch"
        raise refusal(stack.asked, problem) from found
    return found


def _trial(
    stack: Stack,
    forward: Forward,
    layout: Layouts,
    given: _Arguments,
    *,
    packed: bool,
    tainted: bool = False,
    first_only: bool = False,
) -> Probe:
    """Call the whole model padded or packed, and return what its blocks computed."""
    stack.probe = probe = Probe(layout(given.named()), tainted)
    # Without gradients, the last block would compute all tokens.
    probe.layout.first_only = first_only
    attention: AbstractContextManager[Any] = nullcontext() if packed else stack.unpatched()
    try:
        # Each trial starts with the same states of the random generators.
        with isolate_rng(), attention, torch.enable_grad() if first_only else torch.no_grad():
            before = _host_generators()
            stack.begin(probe.layout if packed else None)
            probe.output = forward(*given.args, **given.kwargs)
            stack.finish(probe.output)
            probe.drew_on_host = _host_generators() != before
    finally:
        stack.probe, stack.call, stack.inside = None, None, False
    return probe


def _host_generators() -> tuple[Any, ...]:
    """Return the states of the generators of Python and NumPy."""
    numpy = sys.modules.get("numpy")
    return random.getstate(), numpy and numpy.random.get_state(legacy=False)["state"]["pos"]


class _ConstantDraws(torch_private.TorchDispatchMode):
    """Replaces random numbers by constants, disables dropout, and records the sizes of draws inside blocks."""

    def __init__(self, stack: Stack) -> None:
        super().__init__()
        self._stack = stack

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.name().partition("::")[2].partition(".")[0]
        if name == "dropout" and func.namespace == "hasten":
            self._record(args[0])
            return args[0].clone(), torch.empty(0, dtype=torch.uint8), torch.tensor(0)
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        if "attention" in name:
            return _without_dropout(func, args, kwargs)
        if name == "native_dropout":
            self._record(args[0])
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        with ExitStack() as changed:
            for generator in (*args, *kwargs.values()):
                if isinstance(generator, torch.Generator):  # The user's.
                    changed.callback(generator.set_state, generator.get_state())
            drawn = func(*args, **kwargs)
        for each in drawn if isinstance(drawn, (tuple, list)) else (drawn,):
            if isinstance(each, Tensor):
                self._record(each)
                _fill_constant(each, name, args, kwargs)
        return drawn

    def _record(self, drawn: Tensor) -> None:
        if self._stack.inside and self._stack.probe is not None:
            self._stack.probe.draws.append(drawn.numel())


def _fill_constant(drawn: Tensor, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Replace the result of a random function by a constant."""
    if name.startswith("bernoulli"):
        # The mean, because code usually divides by it afterwards.
        p = args[1] if len(args) > 1 else args[0]
        drawn.copy_(p) if isinstance(p, Tensor) else drawn.fill_(kwargs.get("p", p))
    elif drawn.is_floating_point():
        drawn.fill_(0.0 if "norm" in name or name.startswith("randn") else 0.5)


def _without_dropout(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    names = torch_private.argument_names(func)
    if "dropout_p" in names:
        place = names.index("dropout_p")
        if place < len(args):
            args = (*args[:place], 0.0, *args[place + 1 :])
        else:
            kwargs = {**kwargs, "dropout_p": 0.0}
    return func(*args, **kwargs)


@contextmanager
def _restored(model: nn.Module) -> Iterator[None]:
    """Restore buffers and attributes of modules at the end."""
    modules = list(model.modules())
    attributes = [Snapshot.of(owner) for owner in modules]
    tensors = [(tensor, tensor.clone()) for tensor in _tensors_in(modules)]
    gathered = [
        Snapshot.of(value)
        for each in attributes
        for name, value in each.before.items()
        if name == "_buffers" or (type(value) in (list, dict, set) and name not in _OF_MODULES)
    ]
    for owner in modules:
        _remove_hooks_of_user(owner)
    cached = torch.is_autocast_cache_enabled()
    with ExitStack() as changed:
        changed.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        # Casts made here have no gradient graph, and the cache would reuse them afterwards.
        torch.set_autocast_cache_enabled(False)
        changed.callback(torch.set_autocast_cache_enabled, cached)
        if "torch._dynamo" in sys.modules:
            # Do not compile graphs for these shapes.
            changed.enter_context(torch.compiler.set_stance("force_eager"))
        try:
            yield
        finally:
            for each in (*attributes, *gathered):
                each.restore()
            with torch.no_grad():
                for tensor, copy in tensors:
                    if not torch.equal(tensor, copy):
                        tensor.copy_(copy)


def _tensors_in(modules: Iterable[nn.Module]) -> Iterator[Tensor]:
    """Yield the tensors in attributes and buffers of modules."""
    for owner in modules:
        for tensor in (*vars(owner).values(), *owner._buffers.values()):
            if isinstance(tensor, Tensor) and tensor.layout == torch.strided:
                yield tensor.detach()


def _remove_hooks_of_user(module: nn.Module) -> None:
    """Remove the user's hooks, which may count, keep or log, so they are not called."""
    for name in ("_forward_hooks", "_forward_pre_hooks"):
        hooks = {key: hook for key, hook in vars(module)[name].items() if not is_of_user(hook)}
        if len(hooks) != len(vars(module)[name]):
            vars(module)[name] = OrderedDict(hooks)


# -- choosing samples


def _chosen(lengths: list[int]) -> list[int]:
    """Return the indices of the samples to compare, given their lengths; a single one is repeated.

    Example::

        >>> _chosen([3, 0, 9, 5]), _chosen([4]), _chosen([0])
        ([0, 2, 3], [0, 0], [])

    """
    order = sorted((place for place, length in enumerate(lengths) if length), key=lambda place: lengths[place])
    if not order:
        return []
    few = sorted({order[0], order[len(order) // 2], order[-1]})
    return few if len(few) > 1 else few * 2


# -- comparing


def _scales_whole_tensors(model: nn.Module) -> bool:
    """Return whether layers multiply in 8 bits with a scale for all tokens, which padding changes."""
    owners = ("torchao", "transformer_engine", "bitsandbytes")
    return any(package_of(type(each)) in owners for each in model.modules())


def _own_attention(stack: Stack, block: nn.Module) -> str:
    own = (type(each).__name__ for name, each in block.named_modules() if "attention.self" in name or "attn" in name)
    kind = next(own, None)
    return (
        f"{stack.name_of(block)} has its own attention code{f', {kind},' if kind else ''} which packing cannot "
        "replace: in one row, samples would attend to one another"
    )


def _differences(
    stack: Stack, padded: Probe, packed: Probe, tainted: Probe | Exception, tolerance: float | None
) -> Iterator[str]:
    """Yield what packing changes, with the block that changes it, starting with the most precise reason."""
    # If the trial with nan failed, the model checks that its input is finite; its values are compared below.
    if isinstance(tainted, Probe):
        yield from _mixtures(stack, packed, tainted)
    if [block for block, _ in padded.outputs] != [block for block, _ in packed.outputs]:
        yield "it calls different blocks on a row of real tokens"
    layout = packed.layout
    for (block, exact), (_, row) in zip(padded.outputs, packed.outputs, strict=True):
        if not isinstance(exact, Tensor) or not isinstance(row, Tensor):
            continue
        expected = layout.pack(exact)
        if row.shape != expected.shape or not _close(row[0], expected[0], layout.bounds.tolist(), tolerance):
            yield (
                f"{stack.name_of(block)} computes different values for real tokens in one row than in the padded "
                "batch: its code depends on (samples, tokens), or reads padding"
            )
    if not _same_output(padded, packed, tolerance):
        why = "its code between or after the blocks depends on (samples, tokens) or reads padding"
        if layout.real is not None and not bool(layout.real[:, 0].all()):
            why = "a layer may read the first place of each sample, which is padding for some: pad them on the right"
        yield f"its output differs from that of the padded batch at real tokens: {why}"


def _mixtures(stack: Stack, packed: Probe, tainted: Probe) -> Iterator[str]:
    """Yield what carries values or random draws from one sample of a row to another."""
    begin = int(tainted.layout.bounds[1])
    for block, output in tainted.outputs if tainted.tainted else ():
        if isinstance(output, Tensor) and bool(output[0, begin:].isnan().any()):
            yield (
                f"{stack.name_of(block)} mixes tokens of different samples when they share a row: a convolution or "
                "mean over tokens, batch statistics, or code that uses positions"
            )
    if packed.drew_on_host:
        yield (
            "it draws from the random generator of Python or NumPy, perhaps per sample: dropping samples or "
            "layers at random needs the padded batch"
        )
    tokens, tokens_again = (int(each.layout.bounds[-1]) for each in (packed, tainted))
    for one, other in zip_longest(packed.draws, tainted.draws, fillvalue=0):
        if one * tokens_again != other * tokens or one % tokens:
            yield (
                f"the random numbers that its blocks draw ({one or other}) are not a multiple of the {tokens} "
                "tokens: stochastic depth (drop path) or dropout of whole samples, which share one row here"
            )


def _same_output(padded: Probe, packed: Probe, tolerance: float | None) -> bool:
    exact, found = list(_tensors(padded.output)), list(_tensors(packed.output))
    if [each.shape for each in exact] != [each.shape for each in found]:
        return False
    for one, other in zip(exact, found, strict=True):
        if not one.is_floating_point():
            continue
        if tuple(one.shape[:2]) == packed.layout.shape:
            one, other = packed.layout.pack(one)[0], packed.layout.pack(other)[0]
        if not _close(other, one, [0, len(one)], tolerance):
            return False
    return True


def _check_first_tokens(stack: Stack, packed: Probe, first: Probe) -> None:
    (_, row), (block, alone) = packed.outputs[-1], first.outputs[-1]
    expected = row[0, packed.layout.firsts]
    if alone[0].shape != expected.shape or not _close(alone[0].detach(), expected, [0, len(expected)]):
        problem = f"{stack.name_of(block)} computes different values for first tokens alone than among all tokens"
        raise refusal(stack.asked, problem, "Use packed=True.")


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors(each)
    elif type(value) in (tuple, list):
        for each in value:
            yield from _tensors(each)


def _close(found: Tensor, exact: Tensor, bounds: list[int], tolerance: float | None = None) -> bool:
    """Return whether two outputs are equal up to rounding, sample by sample."""
    tolerance = _tolerance(exact) if tolerance is None else tolerance
    for begin, end in pairwise(bounds):
        one, other = (each[begin:end].detach().cpu().double() for each in (found, exact))
        if not bool(other.isfinite().all()):
            continue
        if not bool((one - other).norm() <= tolerance * other.norm() + 1e-30):
            return False
    return True


def _tolerance(output: Tensor) -> float:
    device = output.device.type
    products = torch.get_float32_matmul_precision()
    if output.dtype == torch.float32 and (products != "highest" or torch.is_autocast_enabled(device)):
        return _LOW_PRECISION
    return _TOLERANCES.get(output.dtype, _LOW_PRECISION)

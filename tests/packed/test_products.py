"""Attention within each of several sequences of one row, and its dropout."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hasten.packed.products import attend_in_batch, attend_within
from hasten.report.peaks import flop_counter

# Two runs of equal lengths, a single token, and a sequence without any.
LENGTHS = [5, 1, 9, 0, 3, 3, 3]
LONG = [300, 5, 130, 300]
HEADS, FEATURES, SCALE = 2, 3, 0.3


def bounds_of(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def inputs(seed: int = 0, lengths: list[int] = LENGTHS) -> list[Tensor]:
    """Query, key and value, ``(tokens, heads, features)``, as the projections make them."""
    generator = torch.Generator().manual_seed(seed)
    shape = (sum(lengths), HEADS, FEATURES)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(3)]


def attend(
    query: Tensor, key: Tensor, value: Tensor, p: float = 0.0, causal: bool = False, lengths: list[int] = LENGTHS
) -> Tensor:
    return attend_within(query, key, value, bounds_of(lengths), p=p, scale=SCALE, causal=causal)


def by_torch(query: Tensor, key: Tensor, value: Tensor, causal: bool, lengths: list[int] = LENGTHS) -> Tensor:
    parts = [
        torch.nn.functional.scaled_dot_product_attention(*rows, scale=SCALE, is_causal=causal)
        for rows in zip(*(each.transpose(0, 1).split(lengths, 1) for each in (query, key, value)), strict=True)
    ]
    return torch.cat(parts, 1).transpose(0, 1)


# With a causal mask, the long ones are computed in blocks.
@pytest.mark.parametrize("lengths", [LENGTHS, LONG], ids=["short", "long"])
@pytest.mark.parametrize("causal", [False, True])
def test_each_sequence_attends_to_itself_as_torch_does(causal: bool, lengths: list[int]) -> None:
    tensors = inputs(lengths=lengths)
    mine, theirs = attend(*tensors, causal=causal, lengths=lengths), by_torch(*tensors, causal, lengths)
    torch.testing.assert_close(mine, theirs)
    weight = torch.randn_like(mine)
    for one, other in zip(
        torch.autograd.grad(mine, tensors, weight), torch.autograd.grad(theirs, tensors, weight), strict=True
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("lengths", [LENGTHS, LONG], ids=["short", "long"])
@pytest.mark.parametrize("causal", [False, True])
def test_the_gradient_is_that_of_the_same_mask(causal: bool, lengths: list[int]) -> None:
    def with_one_mask(*tensors: Tensor) -> Tensor:
        torch.manual_seed(3)
        return attend(*tensors, p=0.3, causal=causal, lengths=lengths)

    assert torch.autograd.gradcheck(with_one_mask, inputs(lengths=lengths), fast_mode=True)


def test_dropout_keeps_the_mean_and_repeats_with_the_seed() -> None:
    query, key, value = (each.detach() for each in inputs())
    exact = attend(query, key, value)
    torch.manual_seed(0)
    drawn = torch.stack([attend(query, key, value, p=0.4) for _ in range(3000)])
    torch.manual_seed(0)
    assert torch.equal(attend(query, key, value, p=0.4), drawn[0])
    assert not torch.equal(drawn[0], drawn[1])
    torch.testing.assert_close(drawn.mean(0), exact, rtol=0, atol=0.12)
    # A token alone attends to itself with weight 1: dropped, or scaled by 1 / (1 - p).
    alone = drawn[:, 5] / value[5]
    share = (alone == 0).double().mean().item()
    assert share == pytest.approx(0.4, abs=0.03)
    assert alone[alone != 0].allclose(torch.tensor(1 / 0.6, dtype=torch.float64))


def test_backward_within_autocast_stays_in_32_bits() -> None:
    tensors = [each.detach().float().requires_grad_() for each in inputs()]
    result = attend(*tensors)
    weight = torch.ones_like(result)
    expected = torch.autograd.grad(result, tensors, weight, retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.autograd.grad(result, tensors, weight)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


# In bfloat16, sequences are padded to a few lengths.
@pytest.mark.parametrize("lengths", [LENGTHS, LONG, [32, 64, 31, 33]], ids=["short", "long", "multiples"])
@pytest.mark.parametrize("causal", [False, True])
def test_padding_in_bfloat16_takes_no_part(causal: bool, lengths: list[int]) -> None:
    tensors = [each.detach().bfloat16().requires_grad_() for each in inputs(lengths=lengths)]
    exact = [each.detach().double().requires_grad_() for each in tensors]
    mine, theirs = attend(*tensors, causal=causal, lengths=lengths), by_torch(*exact, causal, lengths)
    torch.testing.assert_close(mine.double(), theirs, rtol=0.02, atol=0.02)
    weight = torch.randn_like(mine)
    found, expected = torch.autograd.grad(mine, tensors, weight), torch.autograd.grad(theirs, exact, weight.double())
    for one, other in zip(found, expected, strict=True):
        assert (one.double() - other).norm() <= 0.02 * other.norm()


@pytest.mark.parametrize("causal", [False, True])
def test_a_sequence_that_is_not_finite_changes_no_other_one(causal: bool) -> None:
    tensors = [each.detach().bfloat16().requires_grad_() for each in inputs()]
    expected = torch.autograd.grad(attend(*tensors, causal=causal).sum(), tensors)
    spoiled = [each.detach().clone() for each in tensors]
    for each in spoiled:
        each[: LENGTHS[0]] = torch.nan
    spoiled = [each.requires_grad_() for each in spoiled]
    found = torch.autograd.grad(attend(*spoiled, causal=causal).sum(), spoiled)
    assert all(torch.equal(a[LENGTHS[0] :], b[LENGTHS[0] :]) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("causal", [False, True])
def test_it_works_in_bfloat16_and_a_compiler_knows_its_shapes(p: float, causal: bool) -> None:
    query, key, value = (each.detach().bfloat16().requires_grad_() for each in inputs())
    mine = attend(query, key, value)
    mine.sum().backward()
    assert mine.dtype is query.grad.dtype is torch.bfloat16
    torch.testing.assert_close(mine.double(), by_torch(*inputs(), False), rtol=0.05, atol=0.05)
    for tensors in (inputs(), (query, key, value)):
        torch.library.opcheck(
            torch.ops.hasten.packed_attention,
            (*(each.detach() for each in tensors), bounds_of(LENGTHS), p, SCALE, causal),
            test_utils=("test_schema", "test_faketensor"),
        )


def test_its_operations_are_counted_like_those_of_torchs_attention() -> None:
    tensors = [torch.randn(2, 3, 24, 16, requires_grad=True) for _ in range(3)]

    def counted(attend: Callable[..., Tensor]) -> int:
        with flop_counter() as counter:
            attend(*tensors).sum().backward()
        return counter.get_total_flops()

    def in_rows(*tensors: Tensor) -> Tensor:
        rows = (each.transpose(1, 2).flatten(0, 1) for each in tensors)
        return attend_within(*rows, bounds_of([24, 24]), p=0.0, scale=SCALE, causal=False)

    by_kernel = counted(torch.nn.functional.scaled_dot_product_attention)
    assert counted(functools.partial(attend_in_batch, scale=SCALE, causal=False)) == by_kernel
    assert counted(in_rows) == by_kernel

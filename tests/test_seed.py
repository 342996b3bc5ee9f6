"""Seeding, and taking, putting back and setting aside the states of all random generators."""

from __future__ import annotations

import array
import contextlib
import io
import logging
import os
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from hasten.checkpoint.snapshots import Snapshot
from hasten.seed import (
    collect_rng_state,
    is_generator,
    isolate_rng,
    reset_seed,
    restore_rng_state,
    seed_everything,
)
from tests.programs import fork_python
from tests.refusals import refused, warned


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        monkeypatch.setenv(name, "0")
        monkeypatch.delenv(name)


def draws() -> list[Any]:
    numpy = [np.random.rand(), np.random.randn(), np.random.randint(2**30)]
    return [random.random(), random.gauss(0, 1), *numpy, torch.rand(3).tolist(), torch.randn(5).tolist()]


def test_same_seed_gives_the_same_numbers() -> None:
    assert seed_everything(5, workers=True, verbose=False) == 5
    first = draws()
    assert seed_everything(5, verbose=False) == 5
    assert draws() == first
    assert seed_everything(6, verbose=False) == 6
    assert draws() != first
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    assert draws() == first


def test_the_seed_is_said_with_the_rank_of_the_process(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("hasten"), "propagate", True)
    with caplog.at_level("INFO"):
        seed_everything(5)
        monkeypatch.setenv("RANK", "1")
        seed_everything(5)
    assert caplog.messages == ["Seed set to 5", "[rank: 1] Seed set to 5"]


def test_environment_tells_the_processes_that_are_started() -> None:
    seed_everything(5, workers=True, verbose=False)
    assert (os.environ["PL_GLOBAL_SEED"], os.environ["PL_SEED_WORKERS"]) == ("5", "1")
    first = draws()
    assert seed_everything(None, verbose=False) == 5
    assert draws() == first
    reset_seed()
    assert draws() == first


def test_without_any_seed_it_is_zero_and_said() -> None:
    with warned(UserWarning, says="is 0"):
        assert seed_everything() == 0
    reset_seed()


@pytest.mark.parametrize("seed", ["many", [1], -1, 2**32, object])
def test_bad_seed_is_named(seed: Any) -> None:
    with refused(ValueError, "seed", says="seed_everything(seed="):
        seed_everything(seed)


def test_bad_seed_of_the_environment_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "x1")
    with refused(ValueError, says="PL_GLOBAL_SEED='x1'"):
        seed_everything()


def test_state_brings_everything_back() -> None:
    # A normal deviate of a pair is held back by random and numpy: that belongs to the state.
    random.gauss(0, 1)
    np.random.randn()
    state = collect_rng_state()
    first = draws()
    restore_rng_state(state)
    assert draws() == first


def test_state_is_plain_data() -> None:
    state = collect_rng_state()
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    read = torch.load(buffer, weights_only=True)
    assert read == state
    first = draws()
    restore_rng_state(read)
    assert draws() == first


def test_isolated_block_leaves_no_trace_even_after_an_error() -> None:
    state = collect_rng_state()
    with contextlib.suppress(KeyError), isolate_rng():
        draws()
        raise KeyError
    assert collect_rng_state() == state


def test_parts_of_a_state_leave_the_rest_alone() -> None:
    torch.manual_seed(1)
    state = {"torch": collect_rng_state()["torch"]}
    random.seed(2)
    expected = random.random()
    random.seed(2)
    restore_rng_state(state)
    assert random.random() == expected


def test_nothing_touches_the_gpu_before_it_is_used() -> None:
    code = (
        "import torch, hasten.seed as s; state = s.collect_rng_state(); s.restore_rng_state(state); "
        "print(torch.cuda.is_initialized(), 'cuda' in state)"
    )
    result = fork_python("-c", code)
    assert result.stdout.split() == ["False", "False"], result.stderr


def test_the_state_of_the_gpu_that_was_used_goes_to_the_one_that_is(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = [torch.full((4,), index, dtype=torch.uint8) for index in range(3)]
    restored: dict[int, int] = {}

    def restore(state: torch.Tensor, device: int) -> None:
        restored[device] = int(state[0])

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: drawn)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    state = collect_rng_state()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_rng_state", restore)
    restore_rng_state(state)
    assert restored == {0: 2, 1: 1}


@pytest.mark.gpu
def test_state_has_the_gpu() -> None:
    torch.rand(1, device="cuda")
    state = collect_rng_state()
    first = torch.rand(3, device="cuda")
    restore_rng_state(state)
    assert torch.equal(torch.rand(3, device="cuda"), first)


def test_generators_of_every_kind_return_to_a_state() -> None:
    ways: dict[Any, Any] = {
        torch.Generator(): lambda each: torch.rand(1, generator=each).item(),
        random.Random(3): lambda each: each.random(),
        np.random.default_rng(3): lambda each: each.random(),
        np.random.RandomState(3): lambda each: each.random_sample(),
        np.random.PCG64(3): lambda each: int(each.random_raw()),
    }
    for generator, draw in ways.items():
        assert is_generator(generator)
        before = Snapshot.of(generator)
        first = draw(generator)
        before.restore()
        assert draw(generator) == first
    assert not is_generator(random.SystemRandom())


def state_read_anew() -> list[Any]:
    version, words, held = random.getstate()
    kind, keys, position, has_held, also_held = np.random.get_state()
    return [version, array.array("I", words).tobytes(), held, kind, keys.tobytes(), position, has_held, also_held]


def state_collected() -> list[Any]:
    state = collect_rng_state(cuda=False)
    numpy = state["numpy"]
    of_numpy = numpy["bit_generator"], numpy["state"]["key"]["bytes"], numpy["state"]["pos"]
    return [*state["python"], *of_numpy, numpy["has_gauss"], numpy["gauss"]]


@pytest.mark.parametrize(
    "draw",
    [
        random.random,
        lambda: random.gauss(0, 1),
        lambda: random.seed(5),
        lambda: random.shuffle([1, 2, 3]),
        np.random.rand,
        np.random.normal,
        np.random.standard_normal,
        lambda: np.random.seed(5),
        lambda: np.random.permutation(3),
        lambda: None,
    ],
)
def test_collected_states_are_the_present_ones_after_every_way_to_draw(draw: Callable[[], object]) -> None:
    with isolate_rng():
        seed_everything(1, verbose=False)
        assert state_collected() == state_read_anew()
        # The second normal deviate is the one that the first call held back: it draws nothing.
        for _ in range(3):
            draw()
            assert state_collected() == state_read_anew()


def test_a_normal_deviate_that_is_held_back_again_is_collected() -> None:
    with isolate_rng():
        random.gauss(0, 1)
        np.random.normal()
        held, expected = collect_rng_state(cuda=False), state_read_anew()
        random.gauss(0, 1)
        np.random.normal()
        assert state_collected() == state_read_anew() != expected
        restore_rng_state(held)
        assert state_collected() == state_read_anew() == expected


def test_the_state_of_another_generator_behind_numpys_functions_is_collected() -> None:
    before = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(3))
        state = collect_rng_state(cuda=False)
        assert state["numpy"]["bit_generator"] == "PCG64"
        np.random.rand()
        assert collect_rng_state(cuda=False) != state
    finally:
        np.random.set_bit_generator(before)

"""Runs that repeat: seed all generators; save, restore or isolate their states; deterministic algorithms."""

from __future__ import annotations

import array
import ctypes
import functools
import logging
import os
import random
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from hasten._lib.errors import make_error
from hasten._lib.optional import installed
from hasten._lib.rank_zero import get_rank, rank_prefixed_message, rank_zero_only, rank_zero_warn
from hasten.extend.entry_points import found, load

log = logging.getLogger(__name__)

# The largest seed of numpy; all generators get the same seed.
_MAX_SEED = 2**32 - 1


def seed_everything(seed: int | None = None, workers: bool = False, verbose: bool = True) -> int:
    """Seed python's ``random``, numpy and torch on every device, in this process and those it starts.

    Args:
        seed: from 0 to 2**32 - 1. None takes the environment variable ``PL_GLOBAL_SEED``, or 0.
        workers: stored as ``PL_SEED_WORKERS``. The worker processes of a ``DataLoader`` draw different numbers on
            every rank whether or not this is set.
        verbose: log the seed.

    Returns:
        The seed.

    Raises:
        ValueError: the seed is not a whole number in range; the message names its origin.

    Example::

        >>> seed_everything(7, verbose=False)
        7
        >>> first = torch.rand(1)
        >>> _ = seed_everything(7, verbose=False)
        >>> bool(first == torch.rand(1))
        True

    Source: `PyTorch, Reproducibility <https://docs.pytorch.org/docs/stable/notes/randomness.html>`_.

    """
    environment = os.environ.get("PL_GLOBAL_SEED")
    origin, argument = f"seed_everything(seed={seed!r})", "seed"
    given: int | str = 0 if seed is None else seed
    if seed is None and environment is not None:
        origin, argument, given = f"the environment variable PL_GLOBAL_SEED={environment!r}", "", environment
    elif seed is None and verbose:
        rank_zero_warn("seed_everything(): no seed given, so it is 0.", fix="Pass seed=<a whole number>.")
    try:
        seed = int(given)
    except (TypeError, ValueError):
        raise make_error(
            ValueError, f"{origin} is not a whole number between 0 and {_MAX_SEED}.", argument=argument
        ) from None
    if not 0 <= seed <= _MAX_SEED:
        raise make_error(
            ValueError, f"{origin} is out of range. A seed lies between 0 and {_MAX_SEED}.", argument=argument
        )
    if verbose:
        log.info(rank_prefixed_message(f"Seed set to {seed}", get_rank()))
    os.environ["PL_GLOBAL_SEED"] = str(seed)
    os.environ["PL_SEED_WORKERS"] = str(int(workers))
    random.seed(seed)
    if installed("numpy"):
        import numpy

        numpy.random.seed(seed)
    torch.manual_seed(seed)
    global _seedings
    _seedings += 1
    for generator in _device_generators():
        generator.follow()
    return seed


def reset_seed() -> None:
    """Seed again with the last seed of ``seed_everything``; do nothing if it was not called."""
    seed = os.environ.get("PL_GLOBAL_SEED")
    if seed is not None:
        workers = os.environ.get("PL_SEED_WORKERS", "0") == "1"
        seed_everything(int(seed), workers=workers, verbose=False)


def seed_worker(worker_id: int, rank: int | None = None) -> None:
    """Seed python's ``random``, numpy and torch in a worker process of a ``DataLoader``, as Lightning does.

    The numbers differ between workers, ranks and epochs. It is a ``worker_init_fn``.

    ``rank`` is that of the process that reads the loader; by default this one's.

    Source: `MurmurHash3's finalizer <https://github.com/aappleby/smhasher/wiki/MurmurHash3>`_, then the linear
    congruential generator of Knuth's MMIX.

    """
    rank = rank_zero_only.rank if rank is None else rank
    # PyTorch has seeded each worker with the seed of the epoch plus its id.
    base = torch.initial_seed() - worker_id
    state = (base << 32) | (worker_id << 16) | rank
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        state = ((state ^ (state >> 33)) * factor) % 2**64
    state ^= state >> 33
    drawn = []
    for _ in range(3):
        state = (state * 6364136223846793005 + 1) % 2**64
        drawn.append(state)
    torch.manual_seed(drawn[0])
    random.seed((drawn[1] << 32) | drawn[2])
    if installed("numpy"):
        import numpy

        numpy.random.seed(numpy.random.SeedSequence([base, worker_id, rank]).generate_state(4))


def collect_rng_state(*, cuda: bool = True) -> dict[str, Any]:
    """Return the states of all random generators of this process, as plain data.

    With ``cuda`` also of the accelerators in use: CUDA, MPS, and those of packages (``DeviceGenerator``).
    ``torch.load(..., weights_only=True)`` reads the dict of numbers, strings and bytes, and ``==`` compares two of
    them.

    Example::

        >>> state = collect_rng_state()
        >>> first = random.random()
        >>> restore_rng_state(state)
        >>> first == random.random()
        True

    Source: `PyTorch, Reproducibility <https://docs.pytorch.org/docs/stable/notes/randomness.html>`_.

    """
    state: dict[str, Any] = {"python": python_state(), "torch": _bytes(torch.get_rng_state())}
    if "numpy" in sys.modules:
        state["numpy"] = numpy_state()
    if cuda:
        # Do not initialize CUDA only to save a checkpoint.
        if torch.cuda.is_initialized():
            state["cuda"] = [_bytes(device) for device in torch.cuda.get_rng_state_all()]
            state["cuda_in_use"] = torch.cuda.current_device()
        if torch.backends.mps.is_available():
            state["mps"] = _bytes(torch.mps.get_rng_state())
        in_use = (generator for generator in _device_generators() if generator.is_in_use())
        state.update({generator.name: generator.state() for generator in in_use})
    return state


def restore_rng_state(state: dict[str, Any]) -> None:
    """Restore the random generators to a state from :func:`collect_rng_state`.

    Generators not in it are unchanged. States of GPUs that this machine does not have are ignored.

    Example::

        >>> restore_rng_state(collect_rng_state())

    Source: `PyTorch, Reproducibility <https://docs.pytorch.org/docs/stable/notes/randomness.html>`_.

    """
    if "python" in state:
        _set_python_state(random, state["python"])
    if "numpy" in state:
        with suppress(ImportError):
            import numpy

            numpy.random.set_state(_unpacked(state["numpy"]))
    if "torch" in state:
        torch.set_rng_state(_tensor(state["torch"]))
    if "cuda" in state and torch.cuda.is_available():
        for index, device in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(_tensor(device), index)
        # The GPU in use may have another index now: it continues with the state of the former one.
        used = state.get("cuda_in_use")
        if used is not None:
            torch.cuda.set_rng_state(_tensor(state["cuda"][used]), torch.cuda.current_device())
    if "mps" in state and torch.backends.mps.is_available():
        torch.mps.set_rng_state(_tensor(state["mps"]))
    for generator in _device_generators():
        if generator.name in state and generator.is_in_use():
            generator.restore(state[generator.name])


class RandomGenerators:
    """All random generators of this process, as a part of a checkpoint."""

    def state_dict(self) -> dict[str, Any]:
        """Return their states; see ``collect_rng_state``."""
        return collect_rng_state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what ``state_dict`` returned."""
        restore_rng_state(state)


@contextmanager
def isolate_rng(include_cuda: bool = True) -> Iterator[None]:
    """Return a context after which every random generator has its former state.

    Args:
        include_cuda: include the accelerators.

    Example::

        >>> _ = seed_everything(1, verbose=False)
        >>> with isolate_rng():
        ...     first = [torch.rand(1).item() for _ in range(3)]
        >>> first == [torch.rand(1).item() for _ in range(3)]
        True

    Source: `PyTorch, Reproducibility <https://docs.pytorch.org/docs/stable/notes/randomness.html>`_.

    """
    state = collect_rng_state(cuda=include_cuda)
    try:
        yield
    finally:
        restore_rng_state(state)


# -- generators of devices which torch.manual_seed does not reach

# How often ``seed_everything`` was called in this process.
_seedings = 0


class DeviceGenerator(ABC):
    """The random generator of a kind of device, for an entry point of the group ``hasten.generators``.

    The entry point has the name of the library that such a device needs: the generator is loaded when a program has
    imported that.
    """

    # The key of its state in a checkpoint.
    name: str = ""

    def __init__(self) -> None:
        self._seeding = 0

    @abstractmethod
    def is_in_use(self) -> bool:
        """Return whether this process uses such a device; it is not started only to save a checkpoint."""

    @abstractmethod
    def seed(self, seed: int) -> None:
        """Set the seed."""

    @abstractmethod
    def state(self) -> Any:
        """Return its state, as plain data."""

    @abstractmethod
    def restore(self, state: Any) -> None:
        """Restore a state that ``state`` returned."""

    def follow(self) -> None:
        """Use the last seed of ``seed_everything``, once, if the device is in use; called again when it is."""
        if self._seeding != _seedings and self.is_in_use():
            self._seeding = _seedings
            self.seed(int(os.environ["PL_GLOBAL_SEED"]))


def _device_generators() -> Iterator[DeviceGenerator]:
    """Yield the generators of libraries that the program has imported."""
    for library in _libraries():
        if library in sys.modules:
            yield load("hasten.generators", library, purpose="seed_everything")


@functools.cache
def _libraries() -> tuple[str, ...]:
    return tuple(found("hasten.generators"))


# -- states as bytes: a tensor sent between processes would cost a file descriptor each


def generator_state(generator: torch.Generator) -> bytes:
    """Return the state of a torch generator as bytes."""
    return _bytes(generator.get_state())


def set_generator_state(generator: torch.Generator, state: bytes) -> None:
    """Restore the state of a torch generator from :func:`generator_state`."""
    generator.set_state(_tensor(state))


def is_generator(thing: object) -> bool:
    """Return whether ``thing`` is a generator of random numbers: of torch, Python or NumPy.

    Example::

        >>> is_generator(torch.Generator()), is_generator(random.Random()), is_generator(random)
        (True, True, False)

    """
    kind: type = type(thing)
    return is_kind_of_generator(kind)


@functools.cache
def is_kind_of_generator(kind: type) -> bool:
    """Return the same for a class, cached: there are few classes and many objects."""
    if issubclass(kind, (torch.Generator, random.Random)):
        # The generator of the system has no state.
        return not issubclass(kind, random.SystemRandom)
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return False
    return issubclass(kind, (numpy.random.Generator, numpy.random.RandomState, numpy.random.BitGenerator))


def global_generators() -> list[Any]:
    """Return the generators of Python and, if it is loaded, NumPy from which ``random.random`` and the like draw."""
    # Functions of these modules are methods of their generators.
    functions: list[Any] = [random.getstate]
    if "numpy" in sys.modules:
        functions.append(sys.modules["numpy"].random.get_state)
    return [function.__self__ for function in functions]


def seed_from(text: str) -> None:
    """Seed the generators of Python, torch on the CPU, and NumPy with numbers that follow from a text."""
    mixed = random.Random(text)
    random.seed(mixed.getrandbits(64))
    # Not torch.manual_seed, which would also seed the GPUs.
    torch.default_generator.manual_seed(mixed.getrandbits(63))
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed([mixed.getrandbits(32) for _ in range(4)])


def state_of_generator(generator: object) -> object:
    """Return the state of a generator that ``is_generator`` knows, as plain data."""
    if isinstance(generator, torch.Generator):
        return generator_state(generator)
    if isinstance(generator, random.Random):
        return _python_state(generator)
    numpy_generator: Any = generator
    if hasattr(generator, "get_state"):
        return _packed(numpy_generator.get_state(legacy=False))
    return _packed(getattr(generator, "bit_generator", numpy_generator).state)


def set_state_of_generator(generator: object, state: object) -> None:
    """Restore what ``state_of_generator`` returned."""
    numpy_generator: Any = generator
    if isinstance(generator, torch.Generator):
        assert isinstance(state, bytes)
        set_generator_state(generator, state)
    elif isinstance(generator, random.Random):
        _set_python_state(generator, state)
    elif hasattr(generator, "set_state"):
        numpy_generator.set_state(_unpacked(state))
    else:
        getattr(generator, "bit_generator", numpy_generator).state = _unpacked(state)


# The bytes of a Mersenne Twister: 624 numbers of 32 bits, and the position among them.
_TWISTER_BYTES = 625 * 4
# For each global generator: its memory when its state was last read, and the state.
_last_read: dict[str, tuple[object, Any]] = {}


def _unless_same(name: str, memory: object, read: Callable[[Any], Any], source: object) -> Any:
    """Return the state that was last read if the memory of a generator is what it was then, else ``read(source)``.

    To read a state takes 25 us (Python) or 65 us (numpy), and to compare the memory one.
    """
    known = _last_read.get(name)
    if known is None or known[0] != memory:
        known = _last_read[name] = memory, read(source)
    return known[1]


def _memory_of(thing: object) -> bytes:
    """Return the memory of an object behind the head that every object has."""
    return ctypes.string_at(id(thing) + object.__basicsize__, type(thing).__basicsize__ - object.__basicsize__)


def python_state() -> list[Any]:
    """Return the state of ``random`` as plain data, which is not to be changed."""
    generator: Any = getattr(random.getstate, "__self__", None)
    if type(generator) is not random.Random or random.Random.__basicsize__ < _TWISTER_BYTES:
        return _python_state(random)
    # A normal deviate that is held back is an attribute.
    memory = _memory_of(generator), vars(generator)["gauss_next"]
    state: list[Any] = _unless_same("python", memory, _python_state, random)
    return state


def _python_state(generator: Any) -> list[Any]:
    version, words, gauss = generator.getstate()
    return [version, array.array("I", words).tobytes(), gauss]


def _set_python_state(generator: Any, state: Any) -> None:
    version, words, gauss = state
    generator.setstate((version, tuple(array.array("I", words)), gauss))


def numpy_state() -> dict[str, Any]:
    """Return the state of numpy's global generator as plain data, which is not to be changed; numpy must be loaded."""
    numpy: Any = sys.modules["numpy"].random
    # Which generator is behind it can be set; a normal deviate that is held back is in the memory of the outer object.
    outer: Any = getattr(numpy.get_state, "__self__", None)
    inner: Any = numpy.get_bit_generator() if hasattr(numpy, "get_bit_generator") else None
    if type(outer) is not numpy.RandomState or type(inner).__name__ != "MT19937":
        return _numpy_state(numpy)
    memory = _memory_of(outer), ctypes.string_at(inner.ctypes.state_address, _TWISTER_BYTES)
    state: dict[str, Any] = _unless_same("numpy", memory, _numpy_state, numpy)
    return state


def _numpy_state(numpy: Any) -> dict[str, Any]:
    packed: dict[str, Any] = _packed(numpy.get_state(legacy=False))
    return packed


def _packed(value: Any) -> Any:
    if isinstance(value, dict):
        # Without a call for each number and string.
        return {key: inner if type(inner) in (int, float, str) else _packed(inner) for key, inner in value.items()}
    if hasattr(value, "tobytes") and value.shape:
        return {"dtype": value.dtype.str, "bytes": value.tobytes()}
    return value.item() if hasattr(value, "item") else value


def _unpacked(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if set(value) == {"dtype", "bytes"}:
        return sys.modules["numpy"].frombuffer(value["bytes"], dtype=value["dtype"])
    return {key: _unpacked(inner) for key, inner in value.items()}


def _bytes(state: torch.Tensor) -> bytes:
    return bytes(bytearray(state.tolist())) if "numpy" not in sys.modules else state.numpy().tobytes()


def _tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def set_deterministic(deterministic: bool | str | None, *, benchmark: bool | None = None) -> None:
    """Ask torch for deterministic algorithms.

    Args:
        deterministic: True for deterministic algorithms only (an operation that has none raises), "warn" to warn where
            there is none, False to switch this off, None to change nothing.
        benchmark: let cuDNN time its algorithms and take the fastest; None does not change this, except that
            ``deterministic`` switches it off, because timings differ from run to run.

    Example::

        >>> set_deterministic("warn")
        >>> torch.are_deterministic_algorithms_enabled()
        True
        >>> set_deterministic(False)

    """
    if deterministic and benchmark is None:
        benchmark = False
    elif deterministic and benchmark:
        rank_zero_warn(
            f"deterministic={deterministic!r}, benchmark=True: cuDNN takes the algorithm that is fastest in this run, "
            "and another one in the next.",
            fix="Leave benchmark out.",
        )
    if benchmark is not None:
        torch.backends.cudnn.benchmark = bool(benchmark)
    if deterministic is None:
        return
    torch.use_deterministic_algorithms(bool(deterministic), warn_only=deterministic == "warn")
    if deterministic:
        # cuBLAS is deterministic only with a workspace of fixed size; it reads this when it starts.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

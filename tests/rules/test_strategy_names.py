"""``docs/strategy_names.md`` is what the code does with each name of a strategy or an accelerator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import hasten as L
from hasten import elsewhere, resolve, strategies
from tests.programs import load_script

ROOT = Path(__file__).parents[2]
WRITE_IT = "If the change is meant, run: PYTHONPATH=src python scripts/strategy_names.py"
# What the lines of the page are read with.
_NAMES = {name: getattr(strategies, name) for name in strategies.__all__}


def test_the_page_is_made_from_the_code() -> None:
    script = load_script("strategy_names")
    assert script.PAGE.read_text(encoding="utf-8") == script.page(), WRITE_IT


def test_no_name_is_accepted_and_refused() -> None:
    assert resolve.accepted_strategies().keys() & elsewhere.STRATEGIES.keys() == set()
    assert resolve.accepted_accelerators().keys() & elsewhere.ACCELERATORS.keys() == set()


@pytest.mark.parametrize("owner", [L.Trainer, L.Fabric])
def test_each_refusal_says_why_and_what_to_write(owner: Any) -> None:
    for argument, names in (("strategy", elsewhere.STRATEGIES), ("accelerator", elsewhere.ACCELERATORS)):
        for name, refused in names.items():
            with pytest.raises(ValueError, match=f"{owner.__name__}") as error:
                owner(**{argument: name.upper()})
            assert str(error.value) == f"{owner.__name__}({argument}={name.upper()!r}): {refused.message(devices=1)}"
            assert len(str(error.value)) < 240, "a message has two lines at most"


def test_each_line_to_write_is_accepted() -> None:
    written = {refused.write for names in (elsewhere.STRATEGIES, elsewhere.ACCELERATORS) for refused in names.values()}
    for line in sorted(written - {""}):
        arguments = eval(f"dict({line})", dict(_NAMES))
        for name in ("strategy", "accelerator"):
            value = arguments.get(name)
            accepted = resolve.accepted_strategies() if name == "strategy" else resolve.accepted_accelerators()
            assert not isinstance(value, str) or value in accepted, line
        if str(arguments.get("strategy", "")) not in _NOT_ON_CPUS:
            # The other arguments belong to the Trainer, and go with a strategy on CPUs, too.
            given = {"devices": 8, **arguments, "accelerator": "cpu"}
            given["devices"] = 1 if given.get("strategy") in (None, "single_device") else given["devices"]
            L.Trainer(**given, logger=False)


# Strategies that CPUs do not have.
_NOT_ON_CPUS = ("xla", "single_xla", "xla_fsdp", "fsdp_cpu_offload")


def test_each_accepted_name_makes_what_the_page_says() -> None:
    for name, made in resolve.accepted_strategies().items():
        if name in _NOT_ON_CPUS or name.startswith("deepspeed"):
            continue
        trainer = L.Trainer(strategy=name, accelerator="cpu", devices=1 if "single" in name else 2, logger=False)
        assert type(trainer.strategy).__name__ in made


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"strategy": "gpu"}, "that is a kind of device. Write accelerator='gpu'."),
        ({"accelerator": "ddp"}, "that is a strategy. Write strategy='ddp'."),
        ({"accelerator": "ddp2"}, "Write strategy='ddp'."),
        ({"strategy": "dp"}, "DDP has one process per device, does neither, and gives the same gradients."),
        ({"strategy": "horovod"}, "Discontinued: Horovod is no longer developed. Write strategy='ddp'."),
    ],
)
def test_messages(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=r"Trainer\(") as error:
        L.Trainer(**given)
    assert said in str(error.value)

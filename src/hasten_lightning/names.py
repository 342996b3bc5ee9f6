"""The names of Lightning by module, their places in hasten, and replacements for names that hasten does not have."""

from __future__ import annotations

from pathlib import Path

# What packages compare with: `lightning.__version__` and `importlib.metadata.version("lightning")`.
VERSION = "2.6.6"

_LOGGERS = "Use CSVLogger, TensorBoardLogger, WandbLogger, MLFlowLogger or CometLogger."
_JOBS = "Start programs with hasten run or hasten launch on machines of your own, or write a job of your cluster."
_FILES = "Write weights with trainer.save_checkpoint, and store or share the file as your organization does."

# Packages of hosted products -> what to do where they are not installed.
PRODUCTS = {
    "lightning_app": _JOBS,
    "lightning_cloud": _JOBS,
    "lightning_sdk": _JOBS,
    "litlogger": _LOGGERS,
    "litmodels": _FILES,
}


def alternative_to(place: str) -> str | None:
    """Return what to use in place of a name or module, for instance ``"pytorch.metrics"``; None if nothing is known."""
    advice = {
        name: text
        for line in _lines("alternatives.txt")
        for names, _, text in [line.partition(": ")]
        for name in names.split()
    }
    while place and place not in advice:
        place = place.rpartition(".")[0]
    return advice.get(place)


def _lines(name: str) -> list[str]:
    text = Path(__file__).with_name(name).read_text(encoding="utf-8")
    return [line for line in text.strip().replace("\n    ", " ").split("\n") if not line.startswith("#")]


def _read_homes() -> dict[str, dict[str, tuple[str, str]]]:
    """Return section -> name of Lightning -> (module of hasten, name there)."""
    homes: dict[str, dict[str, tuple[str, str]]] = {"": {}}
    names = homes[""]
    for line in _lines("homes.txt"):
        if line.startswith("["):
            names = homes.setdefault(line.strip("[]"), {})
            continue
        home, _, words = line.partition(": ")
        for name, _, there in (word.partition("=") for word in words.split()):
            names[name] = (home, there or name)
    return homes


def read_table() -> dict[str, dict[str, tuple[str, str]]]:
    """Return module of Lightning, without its root -> its names -> (module of hasten, name there)."""
    homes = _read_homes()
    rows: dict[str, str] = {}
    for line in _lines("modules.txt"):
        if line.startswith("["):
            package, _, rows[package] = line[1:].partition("]")
            continue
        for entry in line.split(";"):
            module, _, names = entry.strip().partition(":")
            rows[".".join(filter(None, (package, module)))] = names
    table: dict[str, dict[str, tuple[str, str]]] = {}
    for module, names in rows.items():
        # The innermost section that has a name counts.
        sections = [homes[section] for section in reversed(homes) if f"{module}.".startswith(section)]
        table[module] = {name: next(s[name] for s in sections if name in s) for name in names.split()}
    return table

"""Record which hooks run in which order, and write docs/hooks.md: ``python -m tests.story.hook_order --write``."""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hasten as L
from hasten.hooks import HOOK_NAMES
from hasten.module.datamodule import DataHooks
from hasten.module.hook_defaults import ModelHooks
from tests.models import quiet

PAGE = Path(__file__).parents[2] / "docs" / "hooks.md"

_OTHER_METHODS = (
    "backward",
    "clip_gradients",
    "configure_callbacks",
    "configure_gradient_clipping",
    "configure_optimizers",
    "lr_scheduler_step",
    "optimizer_step",
    "optimizer_zero_grad",
)
_DATA = tuple(name for name in vars(DataHooks) if not name.startswith("_"))
OF_MODULE = sorted(
    {name for name in HOOK_NAMES if hasattr(L.LightningModule, name)}
    | {name for name in vars(ModelHooks) if not name.startswith("_")}
    | {*_OTHER_METHODS, *(name for name in _DATA if not name.endswith("_dataloader"))}
)
OF_CALLBACK = sorted(name for name in vars(L.Callback) if name.startswith(("on_", "setup", "teardown")))
OF_DATAMODULE = sorted({*_DATA, "on_exception"})


def recording(base: type, names: list[str], who: str, calls: list[tuple[str, str]]) -> type:
    """Return a subclass of ``base`` whose methods ``names`` note that they were called."""

    def noting(name: str) -> Callable[..., Any]:
        original = getattr(base, name)

        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append((name, who))
            return original(self, *args, **kwargs)

        return method

    return type(base.__name__, (base,), {name: noting(name) for name in names})


class _Module(L.LightningModule):
    manual = raises = False

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = not self.manual
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.raises:
            raise RuntimeError("on purpose")
        loss = self.layer(batch[0]).mean()
        if not self.manual:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass

    def test_step(self, batch: Any, batch_idx: int) -> None:
        pass

    def predict_step(self, batch: Any, batch_idx: int) -> int:
        return 1

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class _Data(L.LightningDataModule):
    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.ones(4, 4)), 2)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


def _record(call: str = "fit", **options: Any) -> list[tuple[str, str]]:
    calls: list[tuple[str, str]] = []
    flags = {name: options.pop(name, False) for name in ("manual", "raises", "resume")}
    module = recording(_Module, OF_MODULE, "module", calls)
    module.manual, module.raises = flags["manual"], flags["raises"]  # type: ignore[attr-defined]
    model = module()
    data = recording(_Data, OF_DATAMODULE, "datamodule", calls)()
    with tempfile.TemporaryDirectory() as folder:
        options = {"limit_val_batches": 1, "num_sanity_val_steps": 0, "default_root_dir": folder, **options}
        callback = recording(L.Callback, OF_CALLBACK, "callbacks", calls)
        ckpt_path = None
        if flags["resume"]:
            first = quiet(**options)
            first.fit(model, datamodule=data)
            ckpt_path = Path(folder) / "first.ckpt"
            first.save_checkpoint(ckpt_path)
            calls.clear()
            options["max_epochs"] = 2
        trainer = quiet(callbacks=callback(), **options)
        try:
            getattr(trainer, call)(model, datamodule=data, ckpt_path=ckpt_path)
        except RuntimeError:
            calls.append(("(the error leaves fit)", ""))
    return calls


RUNS: dict[str, dict[str, Any]] = {
    "fit": {},
    "accumulate_grad_batches=2": {"accumulate_grad_batches": 2},
    "gradient_clip_val=1.0": {"gradient_clip_val": 1.0},
    "manual optimization": {"manual": True},
    "val_check_interval=1": {"val_check_interval": 1},
    "num_sanity_val_steps=1": {"num_sanity_val_steps": 1},
    "enable_checkpointing=True": {"enable_checkpointing": True},
    "ckpt_path=...": {"resume": True},
    "an error in training_step": {"raises": True},
    "validate": {"call": "validate"},
    "test": {"call": "test"},
    "predict": {"call": "predict"},
}
# What is compared with "fit" in one sentence, and what is shown call by call.
COMPARED = tuple(RUNS)[1:8]
SHOWN = tuple(name for name in RUNS if name not in ("gradient_clip_val=1.0", "enable_checkpointing=True"))


def merged(calls: list[tuple[str, str]]) -> list[tuple[str, list[str]]]:
    """Join neighbouring calls of one hook: ``[(hook, who listens, in order)]``."""
    rows: list[tuple[str, list[str]]] = []
    for name, who in calls:
        if rows and rows[-1][0] == name and who not in rows[-1][1]:
            rows[-1][1].append(who)
        else:
            rows.append((name, [who]))
    return rows


def page() -> str:
    """Return docs/hooks.md as the runs make it."""
    runs = {name: merged(_record(**options)) for name, options in RUNS.items()}
    listeners: dict[str, list[str]] = {}
    for rows in runs.values():
        for hook, who in rows:
            listeners[hook] = max(listeners.get(hook, []), who, key=len)
    counts = {name: Counter(hook for hook, _ in rows) for name, rows in runs.items()}
    lines = [
        "# The order of the hooks",
        "",
        "This page lists the hooks of modules, datamodules and callbacks, in the order in which the Trainer calls",
        "them. It is recorded from runs with two training batches and one validation batch in an epoch, and a test",
        "compares it with new ones. To write it again: `python -m tests.story.hook_order --write`.",
        "",
        "## The hooks of a fit",
        "",
        "The hooks are in the order of their first call. If several objects have a hook, they are called in the order",
        "of the second column, and callbacks in the order of the Trainer's list. Callbacks that save checkpoints and",
        "`EarlyStopping` come after the module in the hooks where they monitor: `on_train_batch_end`,",
        "`on_train_epoch_end`, `on_validation_epoch_end`, `on_validation_end`.",
        "",
        *("| hook | who, in order | calls |", "|---|---|---|"),
        *(f"| `{hook}` | {', '.join(listeners[hook])} | {count} |" for hook, count in counts["fit"].items()),
        "",
        "## What arguments change",
        "",
        "All other hooks are called as often as above:",
        "",
        *(f"- {_titled(name)}: {_changes(counts['fit'], counts[name], listeners)}." for name in COMPARED),
        "",
        "`validate`, `test` and `predict` have the same evaluation hooks, under their own names.",
        "",
        "## Each run, call by call",
        "",
        "The objects are called in the order of the table.",
    ]
    for name in SHOWN:
        hooks = [hook for hook, _ in runs[name]]
        lines += ["", f"### {_titled(name)}", "", "```text", *_shortened(hooks), "```"]
    return "\n".join(lines) + "\n"


def _titled(name: str) -> str:
    return f"`{name}`" if "=" in name or name in ("fit", "validate", "test", "predict") else name.capitalize()


def _changes(usual: Counter[str], found: Counter[str], listeners: dict[str, list[str]]) -> str:
    """Return in words which hooks are called more or less often than usual."""
    groups: dict[str, list[str]] = {}
    for hook in {**usual, **found}:
        if usual[hook] != found[hook]:
            times = {0: "never", 1: "once", 2: "twice"}.get(found[hook], f"{found[hook]} times")
            new = "" if usual[hook] else f" ({', '.join(listeners[hook])})"
            groups.setdefault(times, []).append(f"`{hook}`{new}")
    return "; ".join(f"{times} {', '.join(hooks)}" for times, hooks in groups.items()) or "nothing changes"


def _shortened(hooks: list[str]) -> list[str]:
    lines: list[str] = []
    at = 0
    while at < len(hooks):
        # A block that comes again at once (the hooks of a batch) is shown once, with its count.
        for size in range(min(30, (len(hooks) - at) // 2), 0, -1):
            times = 1
            while hooks[at : at + size] == hooks[at + times * size : at + (times + 1) * size]:
                times += 1
            if times > 1:
                indent = "    " if size > 1 else ""
                lines += [f"{times} times:"] if size > 1 else []
                lines += [f"{indent}{hook}{'' if size > 1 else f' x {times}'}" for hook in hooks[at : at + size]]
                at += times * size
                break
        else:
            lines.append(hooks[at])
            at += 1
    return lines


if __name__ == "__main__":
    import logging

    logging.disable(logging.WARNING)
    text = page()
    if "--write" in sys.argv:
        PAGE.write_text(text)
    else:
        print(text, end="")

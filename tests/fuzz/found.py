"""Inputs that were not handled as promised when they were found, and are now: each is tried again."""

from __future__ import annotations

import datetime
import io
import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy
import torch

from tests.fuzz.checkpoints import GONE
from tests.fuzz.sources import PROGRAM


class Row(NamedTuple):
    """An input of a target."""

    target: str
    value: Any


_SEVERAL = numpy.array([1, 2])
_WIDE = torch.zeros(3, 3)
_LINES = torch.optim.SGD([torch.zeros(1)], 0.1)  # its text has twelve lines
# Arguments that took any value, whose error named none, or whose message had many lines.
_ARGUMENTS: dict[str, dict[str, Any]] = {
    "AdvancedProfiler": {"dump_stats": "", "filename": 7, "dirpath": ()},
    "AsyncCheckpointIO": {"checkpoint_io": ""},
    "BackboneFinetuning": {"should_align": "fsdp", "train_bn": "no", "verbose": [], "initial_denom_lr": 10**400},
    "BatchSizeFinder": {"batch_arg_name": 0},
    "CSVLogger": {"prefix": 3},
    "CombinedLoader": {"iterables": "", "mode": _SEVERAL},
    "DDPStrategy": {"ddp_comm_wrapper": 0.5, "process_group_backend": frozenset(), "parallel_devices": 7},
    "EMAWeightAveraging": {"use_buffers": ()},
    "EarlyStopping": {"check_on_train_epoch_end": "1", "strict": {}, "check_finite": "no", "mode": _SEVERAL},
    "FSDPPrecision": {"device": True},
    "FSDPStrategy": {"parallel_devices": 7},
    "Fabric": {"devices": 2**31, "accelerator": _SEVERAL, "num_nodes": "²"},
    "LearningRateFinder": {"min_lr": "", "update_attr": "no", "attr_name": 3, "num_training_steps": 0},
    "LearningRateMonitor": {"log_momentum": set(), "log_weight_decay": None},
    "LengthBatchSampler": {"drop_last": [], "seed": (1,), "shuffle": {"a"}},
    "LengthBatching": {"reorder": 4, "over_tokens": 0.5},
    "MLFlowLogger": {"experiment_name": 10**30, "synchronous": [["a"]], "tags": 0.5},
    "MeshStrategy": {"ignored_parameters": torch.nn.Linear, "process_group_backend": 4},
    "MixedPrecision": {"fast_attention": "", "device": "fsdp", "scaler": []},
    "ModelCheckpoint": {
        "auto_insert_metric_name": 50, "enable_version_counter": "", "every_n_train_steps": {}, "verbose": "no",
        "save_on_train_epoch_end": "", "save_weights_only": (), "save_on_exception": "no", "every_n_epochs": _WIDE,
    },
    "ModelParallelStrategy": {"process_group_backend": 4},
    "ModelPruning": {
        "parameter_names": ..., "prune_on_train_epoch_end": {}, "pruning_dim": set(), "parameters_to_prune": 1,
        "use_lottery_ticket_hypothesis": (),
    },
    "PackCollator": {"padding": "", "next_token": "no"},
    "PackedBatchSampler": {"drop_last": "", "repeat": set()},
    "PadCollator": {"mask_key": 0.0},
    "PassThroughProfiler": {"filename": 1},
    "PyTorchProfiler": {
        "dirpath": (), "emit_nvtx": (), "export_to_chrome": 6.5, "sort_by_key": [], "row_limit": "a",
    },
    "ResidentLoader": {
        "batch_sampler": 8, "collate_fn": "cpu:0", "dataset": "auto", "shuffle": _SEVERAL, "device": "min",
    },
    "RichProgressBar": {"console_kwargs": "", "theme": None, "leave": "no"},
    "SimpleProfiler": {"dirpath": {"": "a"}, "extended": -2.5, "filename": [""]},
    "SingleDeviceStrategy": {"device": []},
    "SingleDeviceXLAStrategy": {"device": ""},
    "SpikeDetection": {"exclude_batches_path": 0.0},
    "StochasticWeightAveraging": {"avg_fn": frozenset()},
    "TensorBoardLogger": {"default_hp_metric": 3, "log_graph": [], "sub_dir": []},
    "Timer": {"verbose": 1j, "interval": _SEVERAL},
    "Trainer": {
        "resident": _WIDE, "devices": "--1", "max_steps": _SEVERAL, "num_sanity_val_steps": _SEVERAL,
        "gradient_clip_val": 10**400, "max_time": {"days": math.nan},
    },
    "UploadedCheckpointIO": {"checkpoint_io": 1},
    "WandbLogger": {"checkpoint_name": {"a": "b"}, "id": [], "offline": "no"},
    "WeightAveraging": {"use_buffers": "nan"},
    "XLAProfiler": {"port": _WIDE},
}  # fmt: skip
# Texts of several lines in a message, tensors and arrays where a text or a number is compared, and numbers that 64 bits
# do not hold.
_MORE_ARGUMENTS = (
    *(("Trainer", name, _LINES) for name in ("accelerator", "callbacks", "compile", "limit_train_batches", "logger")),
    *(("Trainer", name, _LINES) for name in ("max_time", "overfit_batches", "plugins", "precision", "strategy")),
    *(("Fabric", name, _LINES) for name in ("accelerator", "compile", "loggers", "plugins", "precision", "strategy")),
    *(("FSDPStrategy", name, _LINES) for name in ("activation_checkpointing", "activation_checkpointing_policy")),
    *(("FSDPStrategy", name, _LINES) for name in ("auto_wrap_policy", "cpu_offload", "device_mesh", "mixed_precision")),
    *(("MeshStrategy", name, [_WIDE]) for name in ("ignored_modules", "ignored_parameters")),
    *(("MeshStrategy", name, _SEVERAL) for name in ("cpu_offload", "ignored_modules", "plan", "replicate")),
    *(("MeshStrategy", "ignored_modules", value) for value in (torch.tensor(1), numpy.array(1))),
    ("MeshStrategy", "ignored_parameters", torch.tensor([])),
    ("MeshStrategy", "pipeline", 2**63),
    ("Fabric", "devices", _SEVERAL),
    ("ResidentLoader", "dataset", [[], [math]]),
    ("ModelParallelStrategy", "parallelize_fn", _LINES),
    ("MLFlowLogger", "log_model", {}),
    ("WandbLogger", "log_model", ()),
    *(("XLAFSDPStrategy", "activation_checkpointing_policy", value) for value in (_LINES, "")),
    *(("XLAFSDPStrategy", "state_dict_type", value) for value in (_LINES, _SEVERAL)),
    *(("EarlyStopping", name, _WIDE) for name in ("stopping_threshold", "divergence_threshold")),
    ("CombinedLoader", "iterables", numpy.int64(3)),
    ("FSDPPrecision", "device", ""),
    ("Fabric", "compile", _SEVERAL),
    ("GradientAccumulationScheduler", "scheduling", _LINES),
    ("LengthBatchSampler", "multiple_of", 2**63),
    ("LengthBatchSampler", "sampler", ""),
    ("LengthBatching", "key", []),
    ("LengthBatching", "over_tokens", b""),
    ("LengthBatching", "reorder", [[1]]),
    ("ModelPruning", "parameters_to_prune", ""),
    ("OnExceptionCheckpoint", "filename", _LINES),
    ("PackedBatchSampler", "max_length", 2**63),
    ("PyTorchProfiler", "table_kwargs", {2: 1}),
    *(("ResidentLoader", "batch_size", value) for value in (None, _LINES)),
    *(("ResidentLoader", "dataset", value) for value in ({2: 1}, torch.nn.Sequential(), torch.tensor(1), [2**63])),
    *(("ResidentLoader", "device", value) for value in ("cuda", "cuda:99")),
    ("SLURMEnvironment", "requeue_signal", _LINES),
    ("TokenBatchSampler", "max_tokens", numpy.array(2)),
    ("TokenBatchSampler", "multiple_of", 2**63),
    ("TokenBatchSampler", "num_replicas", _LINES),
    ("Trainer", "benchmark", 1),
    ("UploadedCheckpointIO", "url", _LINES),
)
_TEMPLATES = (
    *("{epoch:c}", "{epoch:99999}", "{epoch:999999999999}", "{epoch:.400f}", "{val_loss:.2f}", "\ud800"),
    *("x" * 300, "a\\" + "x" * 300, "日" * 100),
)
_DURATIONS: tuple[tuple[str, Any], ...] = (
    *(("max_time", text) for text in ("9" * 400 + "d", "9" * 5000 + "s", f"{'9' * 20}:00:00:00", "99999999999w")),
    *(("max_time", {"days": amount}) for amount in (math.nan, math.inf, 10**30, 10**400)),
    *((name, "9" * 5000 + "ep") for name in ("max_epochs", "val_check_interval", "every")),
    *((name, datetime.timedelta(-1)) for name in ("Timer", "interval")),
    *(("interval", "soon"), ("every", "soon"), ("Timer", datetime.timedelta.max)),
)
_TABLES = (b'"' + b"a" * 200_000 + b"\n", b"loss,step\n\xff\xfe,1\n", b'"\rnew",b\n1,2\n')
_DOCUMENTS = (
    *(("hparams.yaml", text) for text in (b"[", b"a: !!python/object/apply:os.mkdir [ran]", b"\xb4", b"\tb: 1")),
    *(("hparams.yaml", text) for text in (b"a: 2026-99-99", b"a: !!timestamp x", b"[" * 400, b"---\n---")),
    ("hparams.yaml", b"width: "),
    *(("hparams.csv", text) for text in (b"a: |\n |", b"key,value\na,[", b"key,value\na,1,2")),
    *(("tags.csv", text) for text in (b"\x7f\na: [1, ", b"\xff\xff", b"- 1\nx")),
)
_RECORDS = (
    *(b'{"kind": "row", "time": 1.0, "step": %s, "values": {"a": 1}}\n' % step for step in (b"1e999",)),
    *(b'{"kind": "start", "time": 1.0, "step": %s}\n' % step for step in (b"[1]", b'"x"', b"NaN")),
    *(b'{"kind": "row", "time": %s, "step": 1, "values": {"a": 1}}\n' % time for time in (b"9" * 400,)),
    *(
        b'{"kind": "row", "time": 1.0, "step": 1, "values": %s}\n' % values
        for values in (b"[1]", b'"a"', b'{"a": %s}' % (b"9" * 400))
    ),
    *(b'{"kind": "speed", "time": 1.0, "step": 1, "lr": %s}\n' % lr for lr in (b"[1]", b'"a"', b"1")),
    b"[" * 5000 + b"\n",
)
_LOGGED = [(9, 0, {"loss": 0.5}), (19, 1, {"loss": 0.25, "lr": 0.1})]
_HISTORIES = (
    *(("lengths", value) for value in (None, [], [1, 2], [10**9], {})),
    *(("ints", value) for value in (None, 3, "a", [], torch.ones(3))),
    *(("names", value) for value in (None, False, [1], [0, "a"], ["a", "b", "c"])),
    *(("small", value) for value in (None, 3, ["loss"])),
    *(("doubles", value) for value in (None, torch.zeros(0), torch.ones(2), 0.5, [[1.0]])),
)
_RANK = ("hasten", "ranks", 0)
_STOPPING = ("callbacks", "EarlyStopping{'monitor': 'train_loss', 'mode': 'min'}")
_ENTRIES: tuple[tuple[tuple[Any, ...], Any], ...] = (
    (("optimizer_states", 0, "state", 3, "exp_avg"), GONE),
    (("lr_schedulers", 0, "gamma"), ([], {"": None})),
    ((*_RANK, "data", "order", "drawn"), GONE),
    ((*_RANK, "data", "generators"), GONE),
    ((*_RANK, "data", "ended"), GONE),
    ((*_RANK, "data", "consumed"), None),
    ((*_RANK, "data", "start", "rng", "python", 1), "min"),
    ((*_RANK, "random", "numpy", "bit_generator"), GONE),
    ((*_RANK, "random", "numpy", "state", "key", "bytes"), {}),
    ((*_STOPPING, "stopped_epoch"), GONE),
    ((*_STOPPING, "best_score"), "a"),
    (("hasten", "history", "ints"), GONE),
)
_FOLDERS: tuple[tuple[tuple[Any, ...], Any], ...] = (
    (("tensors", "state_dict.w"), {"state": {}}),
    (("tensors", "state_dict.b", "dtype"), GONE),
    (("tensors", "state_dict.b", "dtype"), "Tensor"),
    (("tensors", "state_dict.b", "chunks", 0, 0, 0), GONE),
    (("tensors", "state_dict.b", "chunks", 0, 0), None),
    (("tensors", "state_dict.w", "chunks", 0, 1, 0), {}),
    (("tensors",), GONE),
    (("contents",), 3),
    (("files",), None),
    (("files", "__0_0.distcp", 1), torch.zeros(0)),
    (("files", ".metadata", 0), torch.zeros(0)),
    (("tensors", "state_dict.w", "shape", 0), -1),
    (("tensors", "state_dict.w", "shape", 0), True),
    (("contents", "state_dict"), 2),
    (("files", "__0_0.distcp", 0), -math.inf),
    (("tensors", "state_dict.w", "chunks"), []),
)
# Two changes at once.
_FOLDERS_TWICE = [(("tensors", "state_dict.b", "chunks"), {}), (("tensors", "state_dict.b", "shape"), {})]


def _pickles() -> Iterator[tuple[str, bytes]]:
    """Yield files whose contents are no dict, or whose tensor is not in them."""
    for contents in (None, 3, [1]):
        buffer = io.BytesIO()
        torch.save(contents, buffer)
        yield repr(contents), buffer.getvalue()
    buffer = io.BytesIO()
    torch.save({"w": torch.ones(2)}, buffer, _use_new_zipfile_serialization=False)
    # The storage has another key where the tensor is than in the list of storages.
    key = re.search(rb"storageq.(?:.*?)X.\x00\x00\x00(\d{6,})", buffer.getvalue(), re.DOTALL)
    data = buffer.getvalue()
    if key is not None:
        data = data.replace(key[1], b"1" * len(key[1]), 1)
    yield "older", data
    yield "a text that is too long", b"\x80\x02\x8d" + b"\xff" * 7 + b"\x7fa"


_IMPORTS = "import torch\nimport hasten as L\n"
_FUTURE = "from __future__ import annotations"
_EJECTED = (
    *(f'"""A{sign}program."""\n{_IMPORTS}{PROGRAM}' for sign in ("\x0c", "\x85", "\u2028", "\x1c")),
    # Where imports are not sorted, that of torch came before the first.
    f"{_FUTURE}\nimport hasten as L, torch\nfrom os import path  # of a file\n{PROGRAM}",
    f"{_FUTURE}; import os\nimport hasten as L, torch\n{PROGRAM}",
)
ROWS = [
    *(Row("arguments", (kind, {name: value})) for kind, given in _ARGUMENTS.items() for name, value in given.items()),
    *(Row("arguments", (kind, {name: value})) for kind, name, value in _MORE_ARGUMENTS),
    *(Row("arguments", ("TokenBatchSampler", {"num_replicas": many, "rank": many})) for many in ("", 10**400)),
    *(Row("templates", (template, 55296, 1e300, inserts)) for template in _TEMPLATES for inserts in (True, False)),
    *(Row("durations", one) for one in _DURATIONS),
    *(Row("csv", one) for one in _TABLES),
    *(Row("yaml", one) for one in _DOCUMENTS),
    *(Row("hparams", {name: "a"}) for name in ("a\x85b",)),
    *(Row("record", one) for one in _RECORDS),
    *(Row("history", (_LOGGED, [one])) for one in _HISTORIES),
    *(Row("entries", [one]) for one in _ENTRIES),
    *(Row("pickles", one) for one in _pickles()),
    *(Row("folders", [one]) for one in _FOLDERS),
    Row("folders", _FOLDERS_TWICE),
    *(Row("eject", one) for one in _EJECTED),
]

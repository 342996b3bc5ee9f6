"""What goes in: loaders made ready for a run, and streams of batches that can be saved and resumed."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hasten.data.batching import LengthBatching as LengthBatching
    from hasten.data.batching import rebatch as rebatch
    from hasten.data.combined import CombinedLoader as CombinedLoader
    from hasten.data.lengths import LengthBatchSampler as LengthBatchSampler
    from hasten.data.lengths import TokenBatchSampler as TokenBatchSampler
    from hasten.data.packing import PackCollator as PackCollator
    from hasten.data.packing import PackedBatchSampler as PackedBatchSampler
    from hasten.data.packing import document_block_mask as document_block_mask
    from hasten.data.packing import document_mask as document_mask
    from hasten.data.packing import pack as pack
    from hasten.data.packing import packed_attention as packed_attention
    from hasten.data.padding import PadCollator as PadCollator
    from hasten.data.padding import pad_collate as pad_collate
    from hasten.data.preloaded import preload as preload
    from hasten.data.resident_loader import ResidentLoader as ResidentLoader
    from hasten.data.resident_loader import resident as resident
    from hasten.data.sample_fields import MicroBatch as MicroBatch
    from hasten.data.worker_count import auto_workers as auto_workers
    from hasten.data.worker_count import with_workers as with_workers

# The file each public name lives in: nothing is imported before it is asked for.
_FILES = {
    "CombinedLoader": "combined",
    "LengthBatchSampler": "lengths",
    "LengthBatching": "batching",
    "MicroBatch": "sample_fields",
    "PackCollator": "packing",
    "PackedBatchSampler": "packing",
    "PadCollator": "padding",
    "ResidentLoader": "resident_loader",
    "TokenBatchSampler": "lengths",
    "auto_workers": "worker_count",
    "document_block_mask": "packing",
    "document_mask": "packing",
    "pack": "packing",
    "packed_attention": "packing",
    "pad_collate": "padding",
    "preload": "preloaded",
    "rebatch": "batching",
    "resident": "resident_loader",
    "with_workers": "worker_count",
}

__all__ = [
    "CombinedLoader",
    "LengthBatchSampler",
    "LengthBatching",
    "MicroBatch",
    "PackCollator",
    "PackedBatchSampler",
    "PadCollator",
    "ResidentLoader",
    "TokenBatchSampler",
    "auto_workers",
    "document_block_mask",
    "document_mask",
    "pack",
    "packed_attention",
    "pad_collate",
    "preload",
    "rebatch",
    "resident",
    "with_workers",
]


def __getattr__(name: str) -> Any:
    if name in _FILES:
        return getattr(importlib.import_module(f"hasten.data.{_FILES[name]}"), name)
    raise AttributeError(f"module 'hasten.data' has no attribute {name!r}")

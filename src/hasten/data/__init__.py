"""What goes in: loaders made ready for a run, and streams of batches that can be saved and resumed."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hasten.batching.lengths import LengthBatchSampler as LengthBatchSampler
    from hasten.batching.lengths import TokenBatchSampler as TokenBatchSampler
    from hasten.batching.packing import PackCollator as PackCollator
    from hasten.batching.packing import PackedBatchSampler as PackedBatchSampler
    from hasten.batching.packing import document_block_mask as document_block_mask
    from hasten.batching.packing import document_mask as document_mask
    from hasten.batching.packing import pack as pack
    from hasten.batching.packing import packed_attention as packed_attention
    from hasten.batching.pad import PadCollator as PadCollator
    from hasten.batching.pad import pad_collate as pad_collate
    from hasten.batching.rebatch import LengthBatching as LengthBatching
    from hasten.batching.rebatch import rebatch as rebatch
    from hasten.batching.sample_fields import MicroBatch as MicroBatch
    from hasten.data.combined import CombinedLoader as CombinedLoader
    from hasten.data.memory.on_device import ResidentLoader as ResidentLoader
    from hasten.data.memory.on_device import resident as resident
    from hasten.data.memory.shared import preload as preload
    from hasten.data.worker_count import auto_workers as auto_workers
    from hasten.data.worker_count import with_workers as with_workers

# The file each public name lives in: nothing is imported before it is asked for.
_HOME = {
    "CombinedLoader": "hasten.data.combined",
    "LengthBatchSampler": "hasten.batching.lengths",
    "LengthBatching": "hasten.batching.rebatch",
    "MicroBatch": "hasten.batching.sample_fields",
    "PackCollator": "hasten.batching.packing",
    "PackedBatchSampler": "hasten.batching.packing",
    "PadCollator": "hasten.batching.pad",
    "ResidentLoader": "hasten.data.memory.on_device",
    "TokenBatchSampler": "hasten.batching.lengths",
    "auto_workers": "hasten.data.worker_count",
    "document_block_mask": "hasten.batching.packing",
    "document_mask": "hasten.batching.packing",
    "pack": "hasten.batching.packing",
    "packed_attention": "hasten.batching.packing",
    "pad_collate": "hasten.batching.pad",
    "preload": "hasten.data.memory.shared",
    "rebatch": "hasten.batching.rebatch",
    "resident": "hasten.data.memory.on_device",
    "with_workers": "hasten.data.worker_count",
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
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'hasten.data' has no attribute {name!r}")

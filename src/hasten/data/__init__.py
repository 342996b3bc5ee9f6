"""What goes in: loaders made ready for a run, and streams of batches that can be saved and resumed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hasten._lib.lazy import attach

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

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "hasten.batching.rebatch": ("LengthBatching", "rebatch"),
        "hasten.data.combined": ("CombinedLoader",),
        "hasten.batching.lengths": ("LengthBatchSampler", "TokenBatchSampler"),
        "hasten.batching.packing": (
            "PackCollator",
            "PackedBatchSampler",
            "document_block_mask",
            "document_mask",
            "pack",
            "packed_attention",
        ),
        "hasten.batching.pad": ("PadCollator", "pad_collate"),
        "hasten.data.memory.shared": ("preload",),
        "hasten.data.memory.on_device": ("ResidentLoader", "resident"),
        "hasten.batching.sample_fields": ("MicroBatch",),
        "hasten.data.worker_count": ("auto_workers", "with_workers"),
    },
)

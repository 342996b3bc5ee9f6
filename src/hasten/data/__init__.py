"""Loaders: prepared for a run, read from memory, batched by length, and as streams that can be saved and resumed.

``resume/`` has the streams of batches and their positions, ``memory/`` the data held in memory. ``hasten.batching`` has
what makes batches of samples of different lengths; its public names are here too. It must not import ``hasten.module``,
``hasten.strategies`` or ``hasten.loops``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hasten._lib.lazy import attach

if TYPE_CHECKING:
    from hasten.batching.fields import MicroBatch as MicroBatch
    from hasten.batching.packing import PackCollator as PackCollator
    from hasten.batching.packing import pack as pack
    from hasten.batching.pad import PadCollator as PadCollator
    from hasten.batching.pad import pad_collate as pad_collate
    from hasten.batching.rebatch import LengthBatching as LengthBatching
    from hasten.batching.rebatch import rebatch as rebatch
    from hasten.batching.samplers import LengthBatchSampler as LengthBatchSampler
    from hasten.batching.samplers import PackedBatchSampler as PackedBatchSampler
    from hasten.batching.samplers import TokenBatchSampler as TokenBatchSampler
    from hasten.data.combined import CombinedLoader as CombinedLoader
    from hasten.data.memory.resident import ResidentLoader as ResidentLoader
    from hasten.data.memory.resident import resident as resident
    from hasten.data.memory.shared import preload as preload
    from hasten.data.worker_count import auto_workers as auto_workers
    from hasten.data.worker_count import with_workers as with_workers
    from hasten.packed.document_attention import document_block_mask as document_block_mask
    from hasten.packed.document_attention import document_mask as document_mask
    from hasten.packed.document_attention import packed_attention as packed_attention

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "hasten.batching.packing": ("PackCollator", "pack"),
        "hasten.batching.pad": ("PadCollator", "pad_collate"),
        "hasten.batching.rebatch": ("LengthBatching", "rebatch"),
        "hasten.batching.fields": ("MicroBatch",),
        "hasten.batching.samplers": ("LengthBatchSampler", "PackedBatchSampler", "TokenBatchSampler"),
        "hasten.data.combined": ("CombinedLoader",),
        "hasten.data.memory.resident": ("ResidentLoader", "resident"),
        "hasten.data.memory.shared": ("preload",),
        "hasten.data.worker_count": ("auto_workers", "with_workers"),
        "hasten.packed.document_attention": ("document_block_mask", "document_mask", "packed_attention"),
    },
)

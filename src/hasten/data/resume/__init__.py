"""Streams of batches whose position can be saved and restored exactly.

It knows loaders and samplers, and must not import ``hasten.module``, ``hasten.checkpoint`` or ``hasten.loops``.
"""

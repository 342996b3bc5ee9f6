"""Batches of samples of different lengths: padded, cut, sorted by length or packed into rows.

It knows loaders and samples, not runs, and must not import ``hasten.loops``, ``hasten.module`` or
``hasten.strategies``.
"""

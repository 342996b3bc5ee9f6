"""Packing: compute transformer blocks on real tokens only, without padding.

It knows modules of torch and transformers, and must not import ``hasten.module``, ``hasten.data`` or ``hasten.loops``.
"""

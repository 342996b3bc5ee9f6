"""Facades of classes that a command line may name.

The package is private so that jsonargparse, which lists all public subclasses, finds one class of each name: hasten's.
It must not import ``hasten.loops``, ``hasten.trainer`` or ``hasten_tools``.
"""

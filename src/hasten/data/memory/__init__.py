"""Data held in memory: in one process, on a device, or shared by all processes of a machine.

It knows datasets and loaders, and must not import ``hasten.module`` or ``hasten.loops``.
"""

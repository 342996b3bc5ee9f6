"""The machine: devices, clusters, starting the processes of a run, and communication between them.

It knows processes, not models, and must not import ``hasten.module``, ``hasten.strategies`` or ``hasten.loops``.
"""

"""The commands of ``hasten``, one module each; ``known`` lists them for the entry points.

They use hasten as a program does, and must not import ``hasten.strategies``, ``hasten.precision`` or ``hasten.data``.
"""

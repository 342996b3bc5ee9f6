"""The commands for programs with Lightning's names, one module each; ``known`` lists them for the entry points.

They must not import ``hasten_tools``.
"""

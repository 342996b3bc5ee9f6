"""Objects for devices and processes with Lightning's interface: collectives, methods of strategies, registries.

They must not import ``hasten.loops``, ``hasten.trainer`` or ``hasten_tools``.
"""

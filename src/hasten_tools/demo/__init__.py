"""The demo: real training tasks, each timed as a ladder of one-line speed-ups.

It uses hasten as a program does, and must not import ``hasten.loops``, ``hasten.trainer`` or ``hasten_tools.eject``.
"""

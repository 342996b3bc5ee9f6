"""Pictures and pages of runs that were recorded: ``hasten plot`` and ``hasten report``.

It reads files, not running fits, and must not import ``hasten.loops``, ``hasten.trainer`` or ``hasten.callbacks``.
"""

"""What a run records about itself: everything logged, its speed, its checkpoints, and where it ran.

It observes a run without changing it, and must not import ``hasten.loops``, ``hasten.trainer`` or ``hasten_tools``.
"""

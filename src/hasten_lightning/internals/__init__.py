"""Names from inside Lightning that packages import, although its documentation does not have them.

They have Lightning's parameters. Each is written with what hasten does itself, so that it has the same effect.
"""

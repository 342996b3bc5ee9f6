"""Names from inside Lightning that packages import, although its documentation does not have them.

They have Lightning's parameters. Each is implemented with hasten's own functions, so that it has the same effect. They
must not import ``hasten_tools``.
"""

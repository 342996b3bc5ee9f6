"""The tools of hasten: check, advise, plan, report, eject, the demo and the commands.

They use public names of the core (``hasten``), which finds them by entry points and imports nothing from here. They
must not import ``hasten_deepspeed`` or ``hasten_xla``.
"""

"""XLA as a backend of hasten: the accelerator ``"tpu"`` and the strategies ``"xla"``, ``"single_xla"``, ``"xla_fsdp"``.

It uses public names of the core (``hasten``), which finds it by entry points and imports nothing from here. torch_xla
itself is imported when an XLA device is asked for. It must not import ``hasten.loops``, ``hasten.trainer``,
``hasten_tools`` or ``hasten_lightning``.
"""

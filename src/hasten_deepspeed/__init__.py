"""DeepSpeed as a backend of hasten: the strategies ``"deepspeed"`` and ``"deepspeed_stage_..."``.

It uses public names of the core (``hasten``), which finds it by entry points and imports nothing from here. DeepSpeed
itself is imported when a run begins. It must not import ``hasten.loops``, ``hasten.trainer``, ``hasten_tools`` or
``hasten_lightning``.
"""

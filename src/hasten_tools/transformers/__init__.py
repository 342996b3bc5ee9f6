"""``TransformersTrainer``: programs for ``transformers.Trainer``, with their ``TrainingArguments``, on hasten.

It must not import ``hasten.strategies``, ``hasten.precision`` or ``hasten_tools.speed``.
"""

from hasten_tools.transformers.trainer import TransformersTrainer

__all__ = ["TransformersTrainer"]

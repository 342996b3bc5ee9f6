"""``TransformersTrainer``: programs for ``transformers.Trainer``, with their ``TrainingArguments``, on hasten."""

from hasten_tools.transformers.trainer import TransformersTrainer

__all__ = ["TransformersTrainer"]

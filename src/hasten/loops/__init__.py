"""What happens during a run: fit, evaluate, predict. Read ``fit`` first.

A loop works on a ``Run``, and must not import ``hasten.trainer``, ``hasten.fabric`` or ``hasten.callbacks``.
"""

"""The strategy that divides a model along several axes, and what it is made of.

As the other strategies, it does not know the loop that calls it, and must not import ``hasten.module``,
``hasten.loops`` or ``hasten.trainer``.
"""

"""Speed-ups: one-line changes that make training faster, and the advisor that measures them.

It must not import ``hasten.trainer``, ``hasten_tools.preflight`` or ``hasten_lightning``.
"""

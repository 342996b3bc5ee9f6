"""Inputs that nobody thought of, made by hypothesis: a few in each run of the tests, 100,000 with ``make fuzz``."""

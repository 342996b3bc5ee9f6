"""Levers that make training faster, and the advisor that measures them."""

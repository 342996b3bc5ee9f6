"""Levers that make training fast, and the advisor that measures them."""

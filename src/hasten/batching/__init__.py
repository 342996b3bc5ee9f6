"""Batches of samples of different lengths: padded, cut, sorted by length or packed into rows."""

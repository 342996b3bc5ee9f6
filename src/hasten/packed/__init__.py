"""Transformer blocks computed on real tokens only, not on padding."""

"""Packing: compute transformer blocks on real tokens only, without padding."""

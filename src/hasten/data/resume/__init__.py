"""Streams of batches whose position can be saved and restored exactly."""

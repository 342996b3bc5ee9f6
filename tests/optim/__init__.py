"""Tests of hasten.optim."""

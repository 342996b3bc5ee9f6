"""The record of a run: how fast it is, where its time goes, and what it logs."""

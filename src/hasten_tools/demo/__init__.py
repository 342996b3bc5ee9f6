"""The demo: real training tasks, each timed as a ladder of one-line switches."""

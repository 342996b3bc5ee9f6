"""What happens during a run. Read ``fit`` first."""

"""What a run notes about itself: everything logged, its speed, its checkpoints, and where it ran."""

"""What is remembered: what a checkpoint holds, and files that are whole or not there."""

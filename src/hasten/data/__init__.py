"""What goes in: loaders made ready for a run, and streams of batches that can be saved and resumed."""

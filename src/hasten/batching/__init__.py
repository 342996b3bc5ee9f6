"""Variable-length samples: batches of similar length, padding, packing, and the fields that run over tokens."""

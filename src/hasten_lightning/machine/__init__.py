"""Objects around devices and processes in the shape of Lightning's: collectives, methods of strategies, registries."""

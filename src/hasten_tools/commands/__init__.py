"""The commands of ``hasten``, one module each; ``known`` lists them for the entry points."""

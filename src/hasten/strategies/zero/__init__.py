"""DeepSpeed's ZeRO without its strategy: what its engine is configured with, and the state that it holds."""

"""LoRA specialists in four ways of serving them, on the same machine and the same calls."""

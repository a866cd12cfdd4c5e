"""The demo's specialists: small LoRA adapters, and everything that rebuilds them."""

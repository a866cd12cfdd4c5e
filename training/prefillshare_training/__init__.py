"""Cache-conditioned fine-tuning: decoders that generate from a frozen base's KV cache."""

"""What sharing the base's KV does to accuracy and to training; each module has a `--help`."""

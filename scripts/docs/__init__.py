"""What makes the documentation site beside the pages written by hand: generated at build time."""

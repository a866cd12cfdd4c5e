"""Measurements that take too long for the test suite; each has a `--help`."""

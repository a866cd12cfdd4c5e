"""Faults: a real router over the mock pair, on a clock that jumps, judged by an oracle."""

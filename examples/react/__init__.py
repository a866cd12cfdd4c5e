"""A ReAct graph of four specialists on one shared prefill."""

"""How good a decoder is, on its own KV, on the base's, or behind a running server.

`engine.Engine` and `served.Served` generate, `tasks` ask and score, `run.evaluate` puts them
together. Nothing is imported here, so that a command's help need not wait for torch.
"""

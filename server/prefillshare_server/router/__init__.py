"""The router: one OpenAI-compatible front for the base's prefill and the roles' decoders.

Read `call.py` first: it is the life of one request.
"""

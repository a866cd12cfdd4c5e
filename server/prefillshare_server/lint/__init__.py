"""`prefillshare lint`: where a program's prompts stop sharing, from what it sends.

Works with the SDK's dependencies alone; only the real template and tokenizer need the extra `lint`.
"""

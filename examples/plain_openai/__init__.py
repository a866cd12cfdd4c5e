"""A program of the OpenAI client, unchanged but for the import."""

"""A supervisor and three specialists, each with a history of its own."""

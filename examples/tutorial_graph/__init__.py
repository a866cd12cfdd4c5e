"""A plan-and-execute graph as tutorials have it, and what three lines change."""

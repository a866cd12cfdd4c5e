"""Agents that hand the conversation to each other."""

"""Reflexion: attempts, a judge, and a memory of what each attempt lacked."""

"""Mocks: stand-ins for parts that tests of other parts must be able to break at will."""

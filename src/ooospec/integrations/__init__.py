"""Doors into other software."""

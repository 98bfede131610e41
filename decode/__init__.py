"""Turns pages into tokens."""

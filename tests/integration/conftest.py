"""Fixtures that several integration tests share."""

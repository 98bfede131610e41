"""The simulator, its fault record and its checkers."""

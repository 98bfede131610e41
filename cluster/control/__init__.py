"""The controller: makes the fleet what is wanted. Decisions are pure (`core.py`); the shell performs them."""

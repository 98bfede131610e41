"""Paged attention: one interface (base.py) and its backends: reference (torch), cpu (numba), gpu (Triton)."""

"""Turns a prompt into sealed pages."""

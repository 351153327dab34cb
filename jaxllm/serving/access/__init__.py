"""Callers: their keys, their rights and limits, and their usage."""

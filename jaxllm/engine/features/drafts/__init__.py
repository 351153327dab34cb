"""Tokens that a decode tries ahead: where they come from, and how a step finds out which of them are right."""

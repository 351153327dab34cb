"""The HTTP server: one room for each API it speaks, and what they share."""

"""Batches of requests, run in the background through the server's own routes."""

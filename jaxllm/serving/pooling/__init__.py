"""Embeddings, scores, rankings and classes: requests that generate nothing."""

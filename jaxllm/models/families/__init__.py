"""Model families; relatives share a file."""

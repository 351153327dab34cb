"""Several batches of one engine side by side in each step, whose devices share the experts."""

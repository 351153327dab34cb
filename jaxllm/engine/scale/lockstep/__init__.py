"""One model over several processes: process 0 sends each step to the others before it runs it."""

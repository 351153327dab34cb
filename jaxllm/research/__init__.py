"""What a notebook opens up of an engine: its model as a function, activations, scores."""

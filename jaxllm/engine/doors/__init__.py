"""The doors to the engine loop: messages, clients, streams."""

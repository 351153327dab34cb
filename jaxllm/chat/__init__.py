"""Conversations with a model: prompts, answers and tools, whoever asks."""

"""Ollama's API over the chat core: chats and prompts, vectors, and the models that a server has."""

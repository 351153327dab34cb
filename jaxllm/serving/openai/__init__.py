"""OpenAI's chat and text completions, the models, and the tokenizer's routes."""

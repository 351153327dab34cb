"""The OpenAI-compatible HTTP server: routes, protocol types, streaming, metrics."""

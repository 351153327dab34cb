"""A model and MCP servers in one conversation, from Python."""

"""Tools of MCP servers over HTTP, and in conversations."""

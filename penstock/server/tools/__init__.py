"""Tools that the server's own machine runs for chats: those of MCP servers that whoever started it has named."""

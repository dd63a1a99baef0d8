"""Tools of MCP servers that the operator has named: listed and called over MCP's Streamable HTTP, or over the pipes of
programs that the gateway starts."""

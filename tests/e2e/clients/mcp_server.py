"""An MCP server of the package `mcp`: stdio, or PORT json|events|stateless for its forms of HTTP."""

import sys

from mcp.server import MCPServer
from mcp.server.mcpserver import Context

server = MCPServer("sums")


@server.tool(annotations={"readOnlyHint": True})
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def fail() -> str:
    """Fail."""
    raise ValueError("it broke")


@server.tool()
async def tell(ctx: Context) -> str:
    """Tell of progress, and answer."""
    await ctx.report_progress(1, 2)
    await ctx.info("half of it")
    return "told"


if __name__ == "__main__":
    if sys.argv[1:] == ["stdio"]:
        server.run("stdio")
        sys.exit()
    port, form = int(sys.argv[1]), sys.argv[2]
    assert form in ("json", "events", "stateless")
    server.run("streamable-http", port=port, json_response=form == "json", stateless_http=form == "stateless")

"""Tools: functions with a schema, their bounded execution, MCP servers."""

"""Tools: functions, MCP servers, and the box through which a rollout calls them."""

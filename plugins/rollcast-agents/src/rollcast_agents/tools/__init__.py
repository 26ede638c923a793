"""Tools: functions, MCP servers, and the box from which a rollout calls them."""

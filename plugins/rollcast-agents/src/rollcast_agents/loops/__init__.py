"""Agent loops: single reply, tools, environment, and the user's program."""

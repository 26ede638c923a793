"""Agent loops: one reply, tools, an environment, a program of the user's."""

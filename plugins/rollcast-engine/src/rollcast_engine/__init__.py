"""Code shared by rollcast's training engines, and a base for further engines."""

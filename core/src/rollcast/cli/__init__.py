"""The command line: one module a command, a group that plugins can extend, and one way to show errors."""

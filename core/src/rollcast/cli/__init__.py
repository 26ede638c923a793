"""The command line: one module per command, and a command group that plugins can extend."""

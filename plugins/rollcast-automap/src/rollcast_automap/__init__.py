"""Planning of a run: its memory, the mapping of its roles to devices, and simulated speeds."""

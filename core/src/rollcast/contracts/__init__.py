"""The contracts between the core and its plugins: one module each, none of which imports torch."""

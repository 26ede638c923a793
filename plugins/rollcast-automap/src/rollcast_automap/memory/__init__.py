"""Memory of models, roles and processes on a device."""

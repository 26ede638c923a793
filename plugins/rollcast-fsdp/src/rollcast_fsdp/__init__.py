"""The FSDP2 training engine of rollcast; :class:`rollcast_fsdp.engine.FsdpEngine` is the plugin."""

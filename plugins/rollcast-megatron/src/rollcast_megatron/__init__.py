"""The Megatron-core training engine of rollcast; :class:`rollcast_megatron.engine.MegatronEngine` is the plugin."""

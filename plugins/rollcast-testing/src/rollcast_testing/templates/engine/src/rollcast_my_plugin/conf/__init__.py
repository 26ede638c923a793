from rollcast.contracts.config import ConfigSchema, config


@config
class MyPluginConfig:
    name: str = "my_plugin"
    """Registry name of the engine."""


SCHEMAS = (ConfigSchema(schema=MyPluginConfig, group="engine", option="my_plugin"),)

from rollcast.contracts.config import ConfigSchema, config
from rollcast.contracts.sections import RolloutConfig


@config
class MyPluginRolloutConfig(RolloutConfig):
    name: str = "my_plugin"
    """Registry name of the rollout."""


SCHEMAS = (ConfigSchema(path="rollout", schema=MyPluginRolloutConfig, group="rollout", option="my_plugin"),)

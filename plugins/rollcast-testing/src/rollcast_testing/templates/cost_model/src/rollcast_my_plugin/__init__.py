"""The cost model ``my_plugin``: a price per token and pass."""

from rollcast_automap.contract import BaseCostModel, MemoryParts, StageCost


class MyPlugin(BaseCostModel):
    """A price per token and pass, from a stop-watch."""

    seconds_per_token = {"generate": 2e-3, "forward": 1e-5, "update": 4e-5}

    def stage_cost(self, problem, stage, placement, pool, mode):
        return StageCost(compute=self.seconds_per_token[stage.kind] * problem.tokens / pool.devices)

    def memory(self, problem, role, placement, pool, mode):
        numbers = role.model.parameters // (placement.mesh.tensor * placement.mesh.pipeline)
        trained = numbers if role.kind == "trains" else 0
        longest = problem.prompt_lengths.maximum + problem.response_lengths.maximum
        return MemoryParts(
            parameters=numbers * role.model.dtype_bytes,
            gradients=trained * role.gradient_bytes,
            optimizer=trained * role.optimizer_bytes,
            activations=placement.micro_batch_rows * longest * role.model.hidden * role.model.layers * 2,
        )

    def sync_cost(self, problem, trained, rollout, mode):
        return StageCost(communication=1.0)

    def switch_cost(self, problem, role, placement, pool, mode):
        return StageCost()

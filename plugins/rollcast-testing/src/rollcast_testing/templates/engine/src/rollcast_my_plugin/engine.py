import math
from contextlib import contextmanager

import torch
from transformers import AutoModelForCausalLM

from rollcast.contracts.engine import EngineCapabilities
from rollcast.errors import CheckpointError
from rollcast_engine.base import TorchEngine
from rollcast_engine.batching import check_budget, plan_batch
from rollcast_engine.export import write_folder
from rollcast_engine.hf import load_hf_config, parameters_by_name
from rollcast_engine.loss import loss_share
from rollcast_engine.optim import build_optimizer
from rollcast_engine.reduce import MetricSums, agree_on_counts
from rollcast_engine.rng import capture_rng, kept_rng, restore_rng
from rollcast_my_plugin.conf import MyPluginConfig

CPU = torch.device("cpu")


class MyPluginEngine(TorchEngine):
    capabilities = EngineCapabilities(token_budget=True, in_process_module=True)
    config_schema = MyPluginConfig

    def initialize(self):
        model = self.setup.model
        if model.random_init:
            with kept_rng():
                torch.manual_seed(self.setup.seed)
                module = AutoModelForCausalLM.from_config(load_hf_config(model), dtype=torch.float32)
        else:
            module = AutoModelForCausalLM.from_pretrained(model.path, dtype=torch.float32)
        self.module = module.eval()
        self.optimizer = None
        if self.setup.optim is not None:
            self.optimizer = build_optimizer(self.module.parameters(), self.setup.optim)

    @contextmanager
    def mode(self, training):
        before = self.module.training
        self.module.train(training)
        try:
            yield
        finally:
            self.module.train(before)

    # -- steps --------------------------------------------------------------------------------

    def optimizer_zero_grad(self):
        self.optimizer.zero_grad(set_to_none=True)

    def optimizer_step(self):
        norm = float(torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.optim.clip_grad))
        if not math.isfinite(norm):
            self.optimizer_zero_grad()
            return norm, True
        for group in self.optimizer.param_groups:
            group["lr"] = self.current_lr()
        self.optimizer.step()
        return norm, False

    # -- passes -------------------------------------------------------------------------------

    def forward_backward_batch(self, data, loss_function, settings, forward_only=False):
        plan = plan_batch(data, settings)  # which rows go together; padded to their longest on the device
        agreed = agree_on_counts(plan, settings, None, CPU)  # None: there are no other ranks to agree with
        check_budget(agreed.longest, settings)
        names = ["log_probs", *(["entropy"] if settings.calculate_entropy else [])]
        outputs = plan.source.empty_outputs(names)
        sums = MetricSums()
        with torch.set_grad_enabled(not forward_only):
            for index in range(agreed.micro_batches):
                micro = plan.micro_batch(index, CPU)
                output = self.forward(micro, settings)
                if loss_function is not None:
                    loss = loss_share(output, micro, agreed.denominators, loss_function, sums)
                    if not forward_only:
                        loss.backward()
                for name in names:
                    micro.scatter(output[name], outputs[name])
        return (plan.source.as_batch(outputs) if forward_only else None), sums.reduce(None)

    def forward(self, micro, settings):
        """Per-token quantities `[b, t]`: what a loss function gets to see, never logits."""
        length, chosen = micro.responses.size(1), micro.response_mask > 0
        logits = self.module(**micro.model_inputs, use_cache=False).logits[:, -length - 1 : -1]
        scores = (logits.float() / settings.temperature).log_softmax(-1)
        output = {"log_probs": scores.gather(-1, micro.responses.unsqueeze(-1)).squeeze(-1)}
        if settings.calculate_entropy:
            output["entropy"] = -(scores.exp() * scores).sum(-1)
        return {name: values.where(chosen, 0.0) for name, values in output.items()}

    @contextmanager
    def in_process_module(self):
        with self.eval_mode():
            yield self.module

    # -- state --------------------------------------------------------------------------------

    def get_per_tensor_param(self):
        for name, tensor in parameters_by_name(self.module).items():  # a tied weight comes once
            yield name, tensor.detach()

    def to(self, device, *, model=True, optimizer=True, grad=True):
        """There is nowhere else to go on a machine of one kind of memory."""

    def shapes(self):
        return {name: list(tensor.shape) for name, tensor in self.get_per_tensor_param()}

    def save_checkpoint(self, path):
        path.mkdir(parents=True, exist_ok=True)
        state = {
            "shapes": self.shapes(),
            "model": dict(self.get_per_tensor_param()),
            "optimizer": None if self.optimizer is None else self.optimizer.state_dict(),
            "schedule_step": self.schedule_step,
            "rng": capture_rng(),
        }
        torch.save(state, path / "my_plugin.pt")

    def load_checkpoint(self, path):
        state = read_checkpoint(path)
        if state["shapes"] != self.shapes():
            raise CheckpointError(f"checkpoint {path} is of another model")  # before anything is changed
        with torch.no_grad():
            for name, tensor in parameters_by_name(self.module).items():
                tensor.copy_(state["model"][name])
        if self.optimizer is not None:
            self.optimizer.load_state_dict(state["optimizer"])
        self.schedule_step = state["schedule_step"]
        restore_rng(state["rng"])

    def write_export(self, path, is_writer):
        write_folder(path, self.setup.model, self.setup.model_type, self.get_per_tensor_param(), is_writer)

    @classmethod
    def export_checkpoint(cls, checkpoint, model, output):
        write_folder(output, model, "language_model", read_checkpoint(checkpoint)["model"].items())

    # -- ranks --------------------------------------------------------------------------------

    def get_data_parallel_rank(self):
        return 0

    def get_data_parallel_size(self):
        return 1

    def get_data_parallel_group(self):
        return None


def read_checkpoint(path):
    if not (path / "my_plugin.pt").is_file():
        raise CheckpointError(f"there is no checkpoint of the engine my_plugin in {path}")
    return torch.load(path / "my_plugin.pt", weights_only=True)

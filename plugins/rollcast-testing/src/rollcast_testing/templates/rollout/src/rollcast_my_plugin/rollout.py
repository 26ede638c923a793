import asyncio

import torch
from transformers import AutoModelForCausalLM

from rollcast.contracts.rollout import BaseRollout, RolloutCapabilities, RolloutMode, RolloutOutput, RolloutSequence
from rollcast.errors import WeightSyncError
from rollcast_my_plugin.conf import MyPluginRolloutConfig
from rollcast_serving.receiving import WeightTally
from rollcast_serving.requests import ModelLimits, check_request, fit_request
from rollcast_serving.stops import StopStrings


class MyPluginRollout(BaseRollout):
    capabilities = RolloutCapabilities(modes=frozenset(RolloutMode))
    config_schema = MyPluginRolloutConfig

    def __init__(self, setup):
        super().__init__(setup)
        self.model = AutoModelForCausalLM.from_pretrained(setup.model_path).float().eval()
        self.limits = ModelLimits.of(self.model.config)
        self.strings = StopStrings(setup.model_path, setup.trust_remote_code)
        self.random = torch.Generator().manual_seed(setup.seed)
        self.version = 0
        self.broken = ""

    async def generate(self, request):
        request = fit_request(request, self.limits, self.setup.config.on_long_prompt)
        prompt = check_request(request, self.limits)  # refuses what no model can serve, in the same words everywhere
        self.strings.check(request.request_id, request.sampling.stop)
        sequences = [await self.extend(list(prompt), request.sampling) for _ in range(request.sampling.n)]
        return RolloutOutput(request.request_id, sequences, request.sampling)

    async def extend(self, ids, sampling):
        start, log_probs, versions, reason = len(ids), [], [], "length"
        stops = self.setup.stop_ids(sampling)  # the request's, the tokenizer's EOS, the model's others
        matcher = self.strings.matcher(sampling.stop)
        while len(log_probs) < sampling.max_tokens and reason == "length":
            if self.broken:
                raise WeightSyncError(self.broken)
            with torch.no_grad():
                logits = self.model(torch.tensor([ids])).logits[0, -1].float()
            token, log_prob = self.pick(logits, sampling)
            ids.append(token)
            log_probs.append(log_prob)
            versions.append(self.version)
            is_last = token in stops or (matcher is not None and matcher.add(token))
            reason = "stop" if is_last else "length"
            await asyncio.sleep(0)  # other requests go on, and new weights come in
        return RolloutSequence(ids[start:], log_probs, reason, versions)

    def pick(self, logits, sampling):
        if sampling.temperature == 0:
            return int(logits.argmax()), float(logits.log_softmax(-1).max())
        scores = logits / sampling.temperature
        if sampling.top_k > 0:
            scores = scores.masked_fill(scores < scores.topk(sampling.top_k).values[-1], -torch.inf)
        if sampling.top_p < 1:
            mass, order = scores.softmax(-1).sort(descending=True)
            scores = scores.index_fill(0, order[mass.cumsum(-1) - mass >= sampling.top_p], -torch.inf)
        token = int(torch.multinomial(scores.softmax(-1), 1, generator=self.random))
        return token, float(scores.log_softmax(-1)[token])

    async def update_weights(self, buckets, version):
        self.broken = f"the update to version {version} did not succeed"
        weights = self.model.state_dict()
        missing = {tensor.data_ptr(): name for name, tensor in weights.items()}  # a tied weight has two names
        tally = WeightTally(buckets)
        for bucket in tally:  # each tensor's checksum is compared before it comes
            for name, tensor in bucket:
                if name not in weights or weights[name].shape != tensor.shape:
                    shape = tuple(tensor.shape)
                    raise WeightSyncError(f"the model has no weight {name!r} of shape {shape}", tensor=name)
                weights[name].copy_(tensor.detach())
                missing.pop(weights[name].data_ptr(), None)
        for name in missing.values():
            raise WeightSyncError(f"weight {name!r} did not come", tensor=name)
        self.version, self.broken = version, ""
        return tally.report(version)

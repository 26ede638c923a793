"""Helpers of these tests: a tokenizer with a chat template, and an engine that says what it is told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rollcast.contracts.rollout import RolloutOutput, RolloutRequest, RolloutSequence, SamplingParams
from rollcast_agents.contracts.renderer import RendererSetup
from rollcast_agents.contracts.session import Budget
from rollcast_agents.renderers.chat_template import ChatTemplateRenderer
from rollcast_agents.session import RecordingSession

CHATML = """{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{%- for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{%- endfor %}<|im_end|>
{% endfor %}{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

#: As CHATML, but thinking of earlier replies is left out.
FORGETFUL = CHATML.replace(
    "{{ m.content }}",
    "{% if m.reasoning_content and loop.last %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}",
)

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def write_tokenizer(folder: Path, template: str | None = CHATML, further: Sequence[str] = ()) -> str:
    """Write a tokenizer of single characters; return its folder."""
    characters = [chr(code) for code in range(32, 127)] + ["\n", "é", "…"]
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *characters, *further])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=SPECIAL[0],
        pad_token=SPECIAL[0],
        additional_special_tokens=[*SPECIAL[1:], *further],
        chat_template=template,
    )
    fast.save_pretrained(folder)
    return str(folder)


def make_renderer(folder: Path, template: str = CHATML, **options: object) -> ChatTemplateRenderer:
    tool_format = str(options.pop("tool_format", "hermes"))
    return ChatTemplateRenderer(RendererSetup(write_tokenizer(folder, template), tool_format, options))


class ScriptedEngine:
    """Answers each request with the next text, and keeps what it gave.

    Args:
        renderer: encodes the texts.
        script: texts in order, or a function of the request's decoded prompt.
        routes: give experts of each token it reads, ``[tokens, 1, 2]``, of which the first is the token's place.
    """

    def __init__(
        self, renderer: ChatTemplateRenderer, script: Sequence[str] | Callable[[str], str], routes: bool = False
    ) -> None:
        self.renderer = renderer
        self.routes = routes
        self.script = script if callable(script) else None
        self.texts = iter(() if callable(script) else script)
        self.requests: list[RolloutRequest] = []
        self.given: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []  # prompt, tokens, log-probs
        self.random = np.random.default_rng(0)
        self.version = 0

    async def __call__(self, request: RolloutRequest) -> RolloutOutput:
        self.requests.append(request)
        await asyncio.sleep(0)
        prompt = np.asarray(request.prompt_ids, np.int32)
        text = self.script(self.renderer.decode(prompt)) if self.script else next(self.texts)
        ids = np.append(self.renderer.encode(text), self.renderer.stop_token_ids[0])
        reason = "stop" if len(ids) <= request.sampling.max_tokens else "length"
        ids = ids[: request.sampling.max_tokens].astype(np.int32)
        log_probs = -self.random.random(len(ids)).astype(np.float32)
        self.given.append((prompt, ids, log_probs))
        routed = None
        if self.routes:
            places = np.arange(len(prompt) + len(ids), dtype=np.int16)
            places[-1] = -1
            routed = np.stack([places, np.where(places < 0, -1, 7)], 1)[:, None].astype(np.int16)
        sequence = RolloutSequence(ids.tolist(), log_probs.tolist(), reason, [self.version] * len(ids), routed)
        return RolloutOutput(request.request_id, [sequence], request.sampling)


def make_session(engine: ScriptedEngine, budget: Budget | None = None, **options: object) -> RecordingSession:
    return RecordingSession(
        str(options.pop("session_id", "s0")),
        group_id="g0",
        generate=engine,
        renderer=engine.renderer,
        sampling=SamplingParams(max_tokens=200),
        budget=budget,
        **options,  # type: ignore[arg-type]
    )


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def check_accounting(engine: ScriptedEngine, session: RecordingSession) -> None:
    """Every trained token was sampled, once, in its own context; none that was kept is lost."""
    sampled = []
    for trajectory in session.trajectories():
        ids, at = trajectory.token_ids, 0
        for segment in trajectory.segments:
            if segment.sampled:
                sampled.append((tuple(ids[:at]), tuple(segment.token_ids), tuple(segment.log_probs)))
            at += len(segment)
        assert at == len(ids) == len(trajectory.sampled_mask)
        assert not trajectory.segments[0].sampled
    given = [(tuple(prompt), tuple(tokens), tuple(probs)) for prompt, tokens, probs in engine.given]
    assert sorted(sampled) == sorted(given)

"""Tiny models, batches and losses for tests, and reference implementations with plain transformers.

Nothing is downloaded. The module needs transformers and tokenizers, which are not dependencies of the core.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rollcast.contracts.engine import LossInputs, LossOutput
from rollcast.contracts.weights import checkpoint_tensors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from rollcast.contracts.engine import OptimConfig
    from rollcast.protocol import DataProto

__all__ = [
    "CHARACTERS",
    "CHAT_TEMPLATE",
    "SPECIAL",
    "build_tokenizer",
    "distance_loss",
    "jagged_batch",
    "nan_loss",
    "nll_loss",
    "padded_batch",
    "plain_log_probs",
    "plain_model",
    "plain_training",
    "plain_weights",
    "random_batch",
    "tiny_model_folder",
    "trajectory_batch",
]

#: Characters of the tokenizer, one token each, after its special tokens.
CHARACTERS = "0123456789 abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.,:;?!+-*/=<>()[]#$%&'\"\n"
#: The tokenizer's special tokens, with the first ids.
SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
#: A chat template for the tokenizer's characters, which writes the role in brackets on a line before each message.
CHAT_TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}]\n{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]\n{% endif %}"
)


def tiny_model_folder(
    path: Path,
    vocab: int | None = None,
    hidden: int = 64,
    layers: int = 2,
    tied: bool = True,
    weights: bool = True,
    seed: int = 0,
    chat_template: str | None = None,
    head_dim: int = 16,
    experts: int = 0,
) -> Path:
    """Write a random Qwen2 model as a Hugging Face folder, with a tokenizer of one token per character.

    With experts it is a Qwen3-MoE model instead, of which each token visits two experts per layer.

    Args:
        path: folder to create.
        vocab: size of the vocabulary; None for the size of the tokenizer's.
        hidden, layers: hidden size and number of layers of the model.
        tied: True to share the embedding with the vocabulary head.
        weights: True to write weights; False for a folder to be used with ``model.random_init``.
        seed: seed of the weights; the caller's random state is not changed.
        chat_template: chat template of the tokenizer, such as ``CHAT_TEMPLATE``; None for none.
        head_dim: dimension of an attention head; vLLM's CPU kernels need 32 or more.
        experts: number of experts of each layer; 0 for a dense model.

    Returns:
        ``path``.

    Raises:
        ValueError: ``vocab`` is smaller than the tokenizer's vocabulary.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    auto_class: Any = AutoModelForCausalLM
    tokenizer = build_tokenizer()
    tokenizer.chat_template = chat_template
    size = len(tokenizer) if vocab is None else vocab
    if size < len(tokenizer):
        raise ValueError(f"vocab={size} is smaller than the tokenizer's {len(tokenizer)} tokens")
    heads = max(1, hidden // head_dim)
    mixture = {
        "num_experts": experts,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": hidden,
        "norm_topk_prob": True,
        "head_dim": head_dim,
    }
    config = AutoConfig.for_model(
        "qwen3_moe" if experts else "qwen2",
        vocab_size=size,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        architectures=["Qwen3MoeForCausalLM" if experts else "Qwen2ForCausalLM"],
        **(mixture if experts else {}),
    )
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(path)
    if weights:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            auto_class.from_config(config).save_pretrained(path)
    else:
        config.save_pretrained(path)
    return path


def build_tokenizer() -> Any:
    """Return a tokenizer with one token per character."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer_class: Any = PreTrainedTokenizerFast
    ids = {token: number for number, token in enumerate([*SPECIAL, *CHARACTERS])}
    backend = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))  # noqa: S106
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    pad, bos, eos, unknown = SPECIAL
    return tokenizer_class(
        tokenizer_object=backend,
        pad_token=pad,
        bos_token=bos,
        eos_token=eos,
        unk_token=unknown,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def random_batch(
    rows: int, prompt_len: int, response_len: int, vocab: int = len(SPECIAL) + len(CHARACTERS), seed: int = 0
) -> DataProto:
    """Return a padded batch for engines, with ragged lengths drawn from ``seed``.

    Columns: ``prompts``, ``responses``, ``input_ids``, ``attention_mask``, ``position_ids`` and
    ``response_mask``, int64, ``P = prompt_len`` and ``T = response_len``. Prompts have at least one
    token and are padded on the left, responses too and on the right; token 0 pads. One row is as
    long as allowed. Some response tokens in the middle are under a zero mask, as a tool's would be.
    """
    from rollcast.protocol import DataProto

    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(len(SPECIAL), vocab, (rows, prompt_len + response_len), generator=generator)
    prompts = torch.randint(1, prompt_len + 1, (rows, 1), generator=generator)
    responses = torch.randint(1, response_len + 1, (rows, 1), generator=generator)
    prompts[:1], responses[:1] = prompt_len, response_len
    column = torch.arange(prompt_len + response_len)
    attention = ((column >= prompt_len - prompts) & (column < prompt_len + responses)).long()
    input_ids = tokens * attention
    foreign = torch.rand((rows, response_len), generator=generator) < 0.15
    foreign[:, 0] = False
    return DataProto.from_dict(
        tensors={
            "prompts": input_ids[:, :prompt_len],
            "responses": input_ids[:, prompt_len:],
            "input_ids": input_ids,
            "attention_mask": attention,
            "position_ids": (attention.cumsum(-1) - 1).clamp(min=0),
            "response_mask": attention[:, prompt_len:] * (~foreign).long(),
        }
    )


def jagged_batch(batch: DataProto) -> DataProto:
    """Convert a padded batch to jagged columns, as trainers send it; other columns are unchanged.

    Columns ``prompts`` and ``responses``, int32, and ``response_mask``, bool, without positions where the attention
    mask is zero. Further columns ``[B, T]`` become jagged too.
    """
    from rollcast.protocol import Jagged

    attention = batch["attention_mask"] != 0
    width = attention.size(1) - batch["responses"].size(1)
    prompts = Jagged.from_padded(batch["input_ids"][:, :width].int(), attention[:, :width])
    responses = Jagged.from_padded(batch["responses"].int(), attention[:, width:])
    mask = responses.like((batch["response_mask"] != 0)[attention[:, width:]])
    model = ("input_ids", "attention_mask", "position_ids", "prompts", "responses", "response_mask")
    others = batch.drop([name for name in model if name in batch])
    tokens = {
        name: responses.like(others[name][attention[:, width:]])
        for name in others.keys()  # noqa: SIM118  # a batch iterates over its rows
        if isinstance(others[name], torch.Tensor) and others[name].shape == attention[:, width:].shape
    }
    return others.with_columns({"prompts": prompts, "responses": responses, "response_mask": mask, **tokens})


def padded_batch(batch: DataProto) -> DataProto:
    """Pad a jagged batch on the host; the inverse of :func:`jagged_batch`.

    Prompts are padded on the left, everything else on the right; ids and masks are int64. ``input_ids``,
    ``attention_mask`` and ``position_ids`` are added.
    """
    from rollcast.protocol import Jagged

    jagged = {
        name: Jagged.of(batch[name])
        for name in batch.keys()  # noqa: SIM118  # a batch iterates over its rows
        if isinstance(batch[name], torch.Tensor) and batch[name].layout == torch.jagged
    }
    columns = {name: column.pad(left=name == "prompts") for name, column in jagged.items()}
    columns = {name: column if column.is_floating_point() else column.long() for name, column in columns.items()}
    prompts, responses = jagged["prompts"], jagged["responses"]
    present = [column.with_values(torch.ones(len(column.values), dtype=torch.int64)) for column in (prompts, responses)]
    attention = torch.cat([present[0].pad(left=True), present[1].pad()], 1)
    return batch.with_columns(
        {
            **columns,
            "input_ids": torch.cat([columns["prompts"], columns["responses"]], 1),
            "attention_mask": attention,
            "position_ids": (attention.cumsum(-1) - 1).clamp(min=0),
        }
    )


def trajectory_batch(rows: int, seed: int = 0, vocab: int = len(SPECIAL) + len(CHARACTERS)) -> DataProto:
    """Return a jagged batch of multi-turn trajectories, in which tool or user tokens separate the policy's replies.

    Columns: ``prompts``, ``responses`` and ``turn_ids`` int32, ``response_mask`` bool, which is False at half of the
    tokens or so; ``rollout_index`` and ``uid`` int64. Rollouts have one, two or three rows, groups two rollouts. A row
    has up to four turns of up to five tokens. Some end with an answer that the policy never read.
    """
    from rollcast.protocol import DataProto, Jagged

    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=generator))

    prompts = [draw(1, 6) for _ in range(rows)]
    lengths: list[int] = []
    mask: list[bool] = []
    turns: list[int] = []
    rollouts: list[int] = []
    for row in range(rows):
        is_new = row == 0 or rollouts[-3:].count(rollouts[-1]) == 3 or draw(0, 1) == 1
        rollouts.append(rollouts[-1] + is_new if row else 0)
        before, first, count = len(mask), 0 if is_new else turns[-1] + 1, draw(1, 4)
        for turn in range(first, first + count):
            sampled, answer = draw(1, 5), draw(1, 5) if turn < first + count - 1 or row % 3 == 0 else 0
            mask += [True] * sampled + [False] * answer
            turns += [turn] * sampled + [turn + 1] * answer
        lengths.append(len(mask) - before)

    def tokens(counts: list[int]) -> Jagged:
        values = torch.randint(len(SPECIAL), vocab, (sum(counts),), generator=generator, dtype=torch.int32)
        return Jagged.from_lengths(values, torch.tensor(counts))

    responses, index = tokens(lengths), torch.tensor(rollouts)
    return DataProto.from_dict(
        {
            "prompts": tokens(prompts).column(),
            "responses": responses.column(),
            "response_mask": responses.like(torch.tensor(mask)),
            "turn_ids": responses.like(torch.tensor(turns, dtype=torch.int32)),
            "rollout_index": index,
            "uid": index // 2,
        }
    )


def nll_loss(inputs: LossInputs) -> LossOutput:
    """Compute the token-mean negative log-likelihood, with the metrics ``nll`` and ``worst`` (of one token)."""
    if inputs.log_probs is None:
        raise TypeError("nll_loss needs log_probs")
    losses = -inputs.log_probs * inputs.response_mask
    loss = losses.sum() / inputs.denominators.tokens
    return LossOutput(loss, {"nll": loss.detach()}, {"worst": losses.detach().max()})


def distance_loss(inputs: LossInputs) -> LossOutput:
    """Compute the token-mean squared distance of values from 1, with the metric ``distance``."""
    if inputs.values is None:
        raise TypeError("distance_loss needs values")
    loss = ((inputs.values - 1.0) ** 2 * inputs.response_mask).sum() / inputs.denominators.tokens
    return LossOutput(loss, {"distance": loss.detach()})


def nan_loss(inputs: LossInputs) -> LossOutput:
    """Compute a loss that is NaN, as is its gradient."""
    if inputs.log_probs is None:
        raise TypeError("nan_loss needs log_probs")
    return LossOutput(inputs.log_probs.sum() * float("nan"))


def plain_model(path: Path) -> Any:
    """Load the folder's causal LM with transformers in float32, in evaluation mode.

    The pad token's embedding has a gradient, as that of any other token; transformers leaves it without one.
    """
    from transformers import AutoModelForCausalLM

    module: Any = AutoModelForCausalLM.from_pretrained(path)
    module.get_input_embeddings().padding_idx = None
    return module.float().eval()


def plain_log_probs(module: Any, batch: DataProto, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Compute the log-probs of the response tokens and the entropies, each ``[B, T]``, zero where masked.

    Rows are computed one by one without padding, so that the batch's layout has no effect; results have gradients.
    """
    attention, mask = batch["attention_mask"] > 0, batch["response_mask"]
    prompt_width = attention.size(1) - mask.size(1)
    log_probs, entropies = [], []
    for row, present in enumerate(attention):
        tokens = batch["input_ids"][row][present]
        length = int(present[prompt_width:].sum())
        logits = module(input_ids=tokens.unsqueeze(0)).logits[0, -length - 1 : -1].float() / temperature
        scores = torch.log_softmax(logits, dim=-1)
        chosen = scores.gather(-1, tokens[-length:].unsqueeze(-1)).squeeze(-1)
        entropy = -(scores.exp() * scores).sum(-1)
        padding = (0, mask.size(1) - length)
        log_probs.append(torch.nn.functional.pad(chosen, padding) * mask[row])
        entropies.append(torch.nn.functional.pad(entropy, padding) * mask[row])
    return torch.stack(log_probs), torch.stack(entropies)


def plain_training(module: Any, batches: Sequence[DataProto], optim: OptimConfig) -> list[tuple[float, float, float]]:
    """Train ``module`` with AdamW and :func:`nll_loss`; return loss, gradient norm and learning rate of each step.

    Args:
        module: module from :func:`plain_model`; switched to training mode.
        batches: one whole batch per step.
        optim: learning rate, warm-up (then constant), eps, weight decay and clipping.
    """
    module.train()
    adamw = torch.optim.AdamW(module.parameters(), lr=optim.lr, eps=optim.eps, weight_decay=optim.weight_decay)
    steps = []
    for step, data in enumerate(batches):
        rate = optim.lr * min(1.0, (step + 1) / max(optim.lr_warmup_steps, 1))
        adamw.param_groups[0]["lr"] = rate
        adamw.zero_grad()
        log_probs, _ = plain_log_probs(module, data)
        loss = -log_probs.sum() / data["response_mask"].sum()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(module.parameters(), optim.clip_grad)
        adamw.step()
        steps.append((float(loss.detach()), float(norm), rate))
    return steps


def plain_weights(module: Any) -> dict[str, Tensor]:
    """Return copies of a transformers model's parameters and buffers by checkpoint name; tied ones appear once."""
    first = {*dict(module.named_parameters()), *dict(module.named_buffers())}
    state = {name: tensor.clone() for name, tensor in module.state_dict().items() if name in first}
    return checkpoint_tensors(module, state)

"""The engine's parts for themselves: layouts, inputs, the head, random weights, export in shards, the CPU's view."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import megatron_scenarios as scenarios
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from megatron_models import family_config

from rollcast.contracts.engine import ForwardSettings, ModelConfig
from rollcast.errors import ConfigError
from rollcast_engine.batching import dummy_micro_batch, plan_batch
from rollcast_megatron.inputs import RowLayout, decoder_inputs
from rollcast_megatron.maps import FusedQkv, FusedRows, families, find_map
from rollcast_megatron.schemas import MegatronConfig
from rollcast_megatron.vocab import VocabularySlice, head_quantities
from rollcast_megatron.weights import hf_shapes
from rollcast_testing.ranks import Ranks
from rollcast_testing.tiny import plain_log_probs, plain_model, random_batch


@given(ranks=st.sampled_from([1, 2, 4]), per_rank=st.integers(1, 3), queries=st.integers(1, 3), size=st.integers(1, 4))
def test_qkv_of_all_ranks_is_that_of_one(ranks: int, per_rank: int, queries: int, size: int) -> None:
    groups = ranks * per_rank
    layout = FusedQkv(heads=groups * queries, groups=groups, head_dim=size)
    whole = [torch.randn(rows * size, 5) for rows in (groups * queries, groups, groups)]
    shares = [layout.fuse([part.chunk(ranks)[rank] for part in whole], ranks) for rank in range(ranks)]
    assert torch.equal(torch.cat(shares), layout.fuse(whole, 1))
    parts = [layout.unfuse(share, ranks) for share in shares]
    for number, expected in enumerate(whole):
        assert torch.equal(torch.cat([part[number] for part in parts]), expected)
    first = layout.fuse(whole, 1)[: (queries + 2) * size]
    assert torch.equal(first, torch.cat([whole[0][: queries * size], whole[1][:size], whole[2][:size]]))


@given(rows=st.integers(1, 4), count=st.integers(1, 3))
def test_fused_rows(rows: int, count: int) -> None:
    parts = [torch.randn(rows, 2) for _ in range(count)]
    layout = FusedRows(count)
    assert all(map(torch.equal, layout.unfuse(layout.fuse(parts, 1), 1), parts))


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_maps_name_every_parameter_once(family: str, tied: bool, chunks: int, tmp_path: Path) -> None:
    from rollcast_megatron.build import Plan

    config = family_config(family, tied)
    config.save_pretrained(tmp_path)
    mesh: Any = type("Mesh", (), {"pipeline_size": 2, "tensor_size": 1, "tensor_rank": 0})
    placed = list(Plan(find_map(config), mesh, False, (2, 2), chunks).weights())
    assert len({(one.stage, name) for one in placed for name in one.names}) == sum(len(one.names) for one in placed)
    order = [(one.chunk, one.stage) for one in placed]
    assert order == sorted(order)
    assert set(order) == {(chunk, stage) for chunk in range(chunks) for stage in range(2)}
    names = [name for one in placed if not one.is_copy for name in one.weight.sources]
    assert sorted(names) == sorted(hf_shapes(ModelConfig(str(tmp_path)), "language_model"))
    copies = [one.weight.sources for one in placed if one.is_copy]
    assert copies == ([("model.embed_tokens.weight",)] if tied else [])


@given(
    seed=st.integers(0, 1000),
    tensor=st.integers(1, 3),
    context=st.integers(1, 3),
    rows=st.integers(1, 5),
    packs=st.booleans(),
)
def test_rows_start_at_the_front(seed: int, tensor: int, context: int, rows: int, packs: bool) -> None:
    """Every token and prediction is on one context-parallel rank, at the place that its row and position imply."""
    batch = random_batch(rows, 5, 4, seed=seed)
    micro = plan_batch(batch, ForwardSettings()).micro_batch(0, torch.device("cpu"))
    attention = micro.model_inputs["attention_mask"] > 0
    tokens = [micro.model_inputs["input_ids"][row][shown] for row, shown in enumerate(attention)]
    found: list[tuple[int, int]] = []
    sizes = set()
    for rank in range(context):
        inputs = decoder_inputs(micro, RowLayout(packs, tensor, context, rank))
        width, length = inputs.input_ids.shape
        sizes.add((width, length, len(inputs.positions.places)) if context == 1 else (width, length))
        assert length % tensor == 0
        assert width == (1 if packs else rows)
        seen_first = inputs.input_ids.T.flatten(), inputs.position_ids.T.flatten()
        for row, column, place, target in zip(
            inputs.positions.rows,
            inputs.positions.columns,
            inputs.positions.places,
            inputs.positions.targets,
            strict=True,
        ):
            found.append((int(row), int(column)))
            before = int(seen_first[1][place])
            assert seen_first[0][place] == tokens[row][before]
            assert target == tokens[row][before + 1]
        if packs:
            assert inputs.packed is not None
            assert sum(inputs.packed.lengths) == length * context
            assert inputs.packed.cu_seqlens_q.tolist() == [0, *torch.tensor(inputs.packed.lengths).cumsum(0).tolist()]
            assert all(size % (2 * context if context > 1 else 1) == 0 for size in inputs.packed.lengths)
    assert len(sizes) == 1
    assert sorted(found) == [tuple(each) for each in (micro.response_mask > 0).nonzero().tolist()]
    assert len(decoder_inputs(dummy_micro_batch(torch.device("cpu")), RowLayout(packs, tensor)).positions.rows) == 0


def test_chunks_of_a_row_are_those_of_megatron_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformer Engine computes the attention of the chunks that megatron-core's own split gives to a rank."""
    from megatron.core.utils import get_batch_on_this_cp_rank

    batch = random_batch(3, 9, 8, seed=1)
    micro = plan_batch(batch, ForwardSettings()).micro_batch(0, torch.device("cpu"))

    parts = [decoder_inputs(micro, RowLayout(False, 1, 2, rank)) for rank in range(2)]
    whole = torch.zeros(3, 2 * parts[0].input_ids.size(1), dtype=torch.int64)
    for part in parts:
        whole.scatter_(1, part.position_ids, part.input_ids)
    state = "megatron.core.parallel_state.get_context_parallel"
    for rank, part in enumerate(parts):
        monkeypatch.setattr(f"{state}_world_size", lambda: 2)
        monkeypatch.setattr(f"{state}_rank", lambda rank=rank: rank)
        expected = get_batch_on_this_cp_rank({"tokens": whole.clone()})
        assert torch.equal(part.input_ids, expected["tokens"])


@pytest.mark.parametrize("chunk", [2, 100])
def test_head_is_that_of_whole_logits(model_of: Callable[..., Path], chunk: int) -> None:
    scenarios.build(scenarios.ALONE, model_of(), trained=False)  # for a process group of one
    torch.manual_seed(2)
    hidden, weight = torch.randn(7, 6, dtype=torch.float64), torch.randn(9, 6, dtype=torch.float64)
    targets, gradients = torch.randint(0, 8, (7,)), torch.randn(3, 7)
    # One row more than there are words: padding, which must not count.
    vocabulary = VocabularySlice(dist.group.WORLD, start=0, words=8, scale=1 / 0.7, chunk=chunk)

    def plain(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        log_p = (hidden @ weight[:8].T / 0.7).log_softmax(-1)
        chosen = log_p.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        return torch.stack([chosen, -(log_p.exp() * log_p).sum(-1), (2 * log_p).exp().sum(-1)])

    results = []
    for function in (lambda *given: torch.stack(head_quantities(*given, targets, vocabulary)), plain):
        leaves = [hidden.float().requires_grad_(), weight.float().requires_grad_()]
        quantities = function(*leaves)
        (quantities * gradients).sum().backward()
        results.append([quantities.detach(), *(leaf.grad for leaf in leaves)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 4.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_scaled_rotary_embeddings(tmp_path: Path, rope: dict[str, Any]) -> None:
    from megatron_models import family_folder

    scaled = {"rope_parameters": {**rope, "rope_theta": 500.0}, "max_position_embeddings": 256}
    folder = family_folder(tmp_path / "model", "llama", False, **scaled)
    batch = random_batch(3, 60, 9, seed=4)
    engine = scenarios.build(scenarios.ALONE, folder, trained=False)
    with engine.eval_mode():
        given = engine.infer_batch(batch, ForwardSettings())[0]["log_probs"]
    torch.testing.assert_close(given, plain_log_probs(plain_model(folder), batch)[0].detach(), rtol=0, atol=1e-5)
    other = family_folder(
        tmp_path / "other", "llama", False, rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 500.0}
    )
    with pytest.raises(ConfigError, match="rope_type='yarn'"):
        scenarios.build(scenarios.ALONE, other, trained=False)


def test_random_weights_are_the_same_on_every_mesh(two_ranks: Ranks, model_of: Callable[..., Path]) -> None:
    options: dict[str, Any] = {"folder": model_of(), "random_init": True, "steps": 0}
    alone = scenarios.train(scenarios.ALONE, **options)["weights"]
    assert alone["model.embed_tokens.weight"].std() == pytest.approx(0.02, rel=0.1)
    for keys in ({"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}):
        for result in two_ranks.run(scenarios.train, **options, **keys):
            assert all(torch.equal(result["weights"][name], tensor) for name, tensor in alone.items())


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "keys",
    [
        pytest.param({"tensor_model_parallel_size": 2, "sequence_parallel": True}, id="sp2"),
        pytest.param({"pipeline_model_parallel_size": 2}, id="pp2"),
        pytest.param({"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}, id="interleaved"),
        pytest.param(
            {
                "pipeline_model_parallel_size": 2,
                "virtual_pipeline_model_parallel_size": 2,
                "theirs": {"pipeline_model_parallel_size": 2},
            },
            id="interleaved-but-not-the-reference",
        ),
        pytest.param({"context_parallel_size": 2, "use_remove_padding": True}, id="cp2-packed"),
    ],
)
def test_the_exact_kl_is_that_of_one_rank(
    two_ranks: Ranks, model_of: Callable[..., Path], keys: dict[str, Any]
) -> None:
    options: dict[str, Any] = {"folder": model_of("qwen2", True), "other": model_of("qwen2", False)}
    alone = scenarios.compare(scenarios.ALONE, **options)
    assert alone["history"][0].grad_norm > 1e-3
    for result in two_ranks.run(scenarios.compare, **options, **keys):
        torch.testing.assert_close(
            result["before"]["vocabulary_kl"], alone["before"]["vocabulary_kl"], rtol=1e-5, atol=1e-5
        )
        for expected, step in zip(alone["history"], result["history"], strict=True):
            assert step.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
        for name, tensor in alone["weights"].items():
            torch.testing.assert_close(result["weights"][name], tensor, rtol=1e-5, atol=5e-6, msg=name)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("family", "keys"),
    [
        ("qwen3_moe", {}),
        ("qwen3_moe", {"expert_model_parallel_size": 2}),
        ("llama", {"dtype": "bfloat16"}),
        ("llama", {"use_distributed_optimizer": False}),
        ("llama", {"tensor_model_parallel_size": 2}),
    ],
    ids=["copies", "ep2", "bf16", "whole-optimizer", "tp2"],
)
def test_state_in_host_memory_changes_no_number(
    two_ranks: Ranks, model_of: Callable[..., Path], tmp_path: Path, family: str, keys: dict[str, Any]
) -> None:
    """Weights are views of megatron-core's buffers, or parameters whose hooks collect the gradient."""
    folder = model_of(family, False)
    expected = two_ranks.run(scenarios.stay, folder=folder, **keys)
    results = two_ranks.run(scenarios.offload, folder=folder, checkpoint=tmp_path / "checkpoint", **keys)
    for plain, result in zip(expected, results, strict=True):
        assert (result["stayed"], result["gradients"]) == ([], 0)
        assert result["history"] == [*plain["history"], plain["history"][-1]]
        assert all(torch.equal(result["synced"][name], tensor) for name, tensor in plain["synced"].items())


def test_torch_stays_as_it_is() -> None:
    """Preparing megatron-core for the CPU changes nothing that others see."""
    script = """
import torch
before = (torch.empty, torch.cuda.current_device, torch.Tensor.type, torch.get_rng_state())
from rollcast_megatron import cpu
cpu.install()
assert before[:3] == (torch.empty, torch.cuda.current_device, torch.Tensor.type)
assert torch.equal(before[3], torch.get_rng_state())
assert torch.zeros(1).type() == "torch.FloatTensor"
with cpu.cuda_type_names():
    assert torch.zeros(1).type() == "torch.cuda.FloatTensor"
    assert torch.zeros(1).cuda().device.type == "cpu"
import megatron.core.pipeline_parallel.schedules as schedules
assert schedules.torch is not torch and schedules.torch.nn is torch.nn
assert schedules.torch.zeros(1, device="cuda").device.type == "cpu"
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], check=True, timeout=300)


def test_inert_where_cuda_is(monkeypatch: pytest.MonkeyPatch) -> None:
    from contextlib import nullcontext

    from rollcast_megatron import cpu

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cpu, "_cpu_view", lambda: pytest.fail("nothing is to be changed"))
    cpu.install.__wrapped__()
    assert isinstance(cpu.cuda_type_names(), nullcontext)


def test_the_pages_map_is_a_map(tmp_path: Path) -> None:
    """The example of the documentation, as it stands there, against plain transformers."""
    from transformers import MistralConfig, MistralForCausalLM

    page = Path(__file__).parents[3] / "docs" / "engine-megatron.md"
    code = page.read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    names: dict[str, Any] = {}
    exec(compile(code, str(page), "exec"), names)
    config = MistralConfig(
        vocab_size=91,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        sliding_window=None,
    )
    MistralForCausalLM(config).save_pretrained(tmp_path)
    batch = random_batch(3, 5, 6)
    with families.temporarily("mistral", names["mistral"]):
        engine = scenarios.build(scenarios.ALONE, tmp_path, trained=False)
        with engine.eval_mode():
            given = engine.infer_batch(batch, ForwardSettings())[0]["log_probs"]
        torch.testing.assert_close(given, plain_log_probs(plain_model(tmp_path), batch)[0].detach(), rtol=0, atol=1e-5)
        with pytest.raises(ConfigError, match="sliding_window=64"):
            find_map(MistralConfig(sliding_window=64))


def test_fused_kernels_run_on_cuda_if_their_extension_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    from rollcast_megatron import build, module

    assert not any(build.fused_kernels(on_cuda=False).values())
    for installed in (False, True):
        monkeypatch.setattr(module, "has_transformer_engine", lambda found=installed: found)
        monkeypatch.setattr(build, "find_spec", lambda _name, found=installed: object() if found else None)
        kernels = build.fused_kernels(on_cuda=True)
        assert kernels["bias_activation_fusion"]
        assert kernels["bias_dropout_fusion"]
        assert kernels["apply_rope_fusion"] is installed
        assert kernels["gradient_accumulation_fusion"] is installed


@pytest.mark.parametrize(
    ("stages", "first", "last", "layers", "expected"),
    [
        (1, None, None, 5, (5,)),
        (2, None, None, 4, (2, 2)),
        (3, None, None, 4, None),
        (2, 1, None, 4, (1, 3)),
        (2, None, 1, 4, (3, 1)),
        (2, 1, 3, 4, (1, 3)),
        (2, 1, 2, 4, None),
        (4, 1, 1, 6, (1, 2, 2, 1)),
        (4, 1, 1, 3, None),
        (4, 3, None, 9, (3, 2, 2, 2)),
    ],
)
def test_layers_of_stages(stages: int, first: int | None, last: int | None, layers: int, expected: Any) -> None:
    config = MegatronConfig(
        pipeline_model_parallel_size=stages,
        num_layers_in_first_pipeline_stage=first,
        num_layers_in_last_pipeline_stage=last,
    )
    assert config.stage_layers(layers) == expected

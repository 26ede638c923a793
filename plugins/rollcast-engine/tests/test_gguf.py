"""A model in a GGUF file: what is written by llama.cpp's package is read as a Hugging Face folder."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from packaging.requirements import Requirement
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig
from transformers.convert_slow_tokenizer import bytes_to_unicode

from rollcast.contracts import gguf as conversion
from rollcast.contracts.engine import ModelConfig
from rollcast.contracts.health import HealthSetup
from rollcast.contracts.storage import ModelPath, NodeCopies
from rollcast.errors import ConfigError
from rollcast_data.tokenizer import read_tokenizer
from rollcast_engine.health import ModelCheck

gguf = pytest.importorskip("gguf")
pytest.importorskip("accelerate")

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEXT = "Ünïcode 🙂 and  two spaces\n\tx = 1.50"
HEADS, KV_HEADS = 4, 2


@dataclass
class OtherModel:
    """A model's section without a path, as a critic's that has the actor's model."""

    path: ModelPath | None = None


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(SPECIALS) + 256 + 2,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=128,
        rope_theta=5000.0,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    return AutoModelForCausalLM.from_config(config)


def write(file: Path, model: Any, without: str = "") -> Path:
    """Write the model as llama.cpp's converter does, with a byte-level tokenizer that has two merges.

    Args:
        without: name of a weight that the file lacks.
    """
    config, writer = model.config, gguf.GGUFWriter(file, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(config.hidden_size // HEADS)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    tokens = [*SPECIALS, *bytes_to_unicode().values(), "an", "and"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIALS) + [1] * (len(tokens) - len(SPECIALS)))
    writer.add_token_merges(["a n", "an d"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name in ("lm_head.weight", without):  # the head is tied
            continue
        array = tensor.numpy()
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            array = interleave(array, HEADS if "q_proj" in name else KV_HEADS)
        writer.add_tensor(names.get_name(name, (".weight",)), array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def interleave(weight: Any, heads: int) -> Any:
    """Order the rows of each head for llama.cpp's rotary embedding, which turns neighbours and not halves."""
    rows, columns = weight.shape
    pairs = weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2)
    return np.ascontiguousarray(pairs.reshape(rows, columns))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ROLLCAST_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def place(path: Path, **keys: Any) -> Path:
    return Path(NodeCopies().place(ModelConfig(str(path), **keys), "model").path)


def pretend(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    """Make the conversion find these packages only."""

    def version(name: str) -> str:
        if name not in versions:
            raise conversion.importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(conversion.importlib.metadata, "version", version)


def test_the_folder_has_weights_tokenizer_template_and_stop_token(model: Any, tmp_path: Path) -> None:
    folder = place(write(tmp_path / "tiny.gguf", model))
    read = AutoModelForCausalLM.from_pretrained(folder)
    for name, tensor in model.state_dict().items():
        assert torch.equal(read.state_dict()[name], tensor), name
    assert read.dtype == torch.float32
    ids = torch.arange(40)[None]
    with torch.no_grad():
        torch.testing.assert_close(read(ids).logits, model(ids).logits)
    tokenizer = read_tokenizer(folder)
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert len(tokenizer.encode("and")) == 1
    chat = [{"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
    assert GenerationConfig.from_pretrained(folder).eos_token_id == 2


def test_a_file_is_converted_once_whatever_its_path(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path / "tiny.gguf", model)
    folder = place(file)
    (tmp_path / "folder").mkdir()
    file.rename(tmp_path / "folder" / "tiny.gguf")
    pretend(monkeypatch)  # converting again would say so
    assert place(tmp_path / "folder") == folder
    changed = place(tmp_path / "folder", override_config={"max_position_embeddings": 64})
    assert AutoModelForCausalLM.from_pretrained(changed).config.max_position_embeddings == 64
    assert AutoModelForCausalLM.from_pretrained(folder).config.max_position_embeddings == 128


def test_a_url_is_copied_and_converted(model: Any, tmp_path: Path, cache: Path) -> None:
    (tmp_path / "source").mkdir()
    write(tmp_path / "source" / "tiny.gguf", model)
    copies = NodeCopies()
    folder = Path(copies.place(ModelConfig(f"file://{tmp_path}/source"), "model").path)
    assert not folder.exists()  # the driver only plans
    copies.make()
    assert (folder / "model.safetensors").is_file()
    assert folder.is_relative_to(cache)


def test_other_weights_take_precedence(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    (tmp_path / "model.safetensors").touch()
    assert place(tmp_path) == tmp_path
    assert place(tmp_path / "absent") == tmp_path / "absent"
    assert NodeCopies().place(OtherModel(), "critic.model") == OtherModel()


def test_a_missing_weight_is_not_made_up(model: Any, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(ConfigError, match=rf"tiny\.gguf lacks 1 weights of its model, such as {name}"):
        place(write(tmp_path / "tiny.gguf", model, without=name))


def test_the_doctor_knows_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.gguf").touch()
    for path in (tmp_path, tmp_path / "a.gguf"):
        (finding,) = ModelCheck().run(HealthSetup(config={"model": {"path": str(path)}}))
        assert (finding.state, finding.name) == ("ok", "gguf")
    pretend(monkeypatch)
    (finding,) = ModelCheck().run(HealthSetup(config={"model": {"path": str(tmp_path)}}))
    assert (finding.state, finding.fix) == ("problem", "pip install 'rollcast-engine[gguf]'")
    (tmp_path / "b.gguf").touch()
    (finding,) = ModelCheck().run(HealthSetup(config={"model": {"path": str(tmp_path)}}))
    assert finding.state == "problem" and "name one of them: a.gguf, b.gguf" in finding.message


def test_the_extra_installs_what_a_conversion_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [Requirement(line) for line in requires("rollcast-engine") or ()]
    extra = {str(Requirement(f"{each.name}{each.specifier}")) for each in found if "gguf" in str(each.marker)}
    pretend(monkeypatch)
    assert extra == set(conversion.missing_packages())


def test_problems_are_named(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a.Q4_K.gguf", "a.Q8_0.gguf"):
        (tmp_path / name).write_bytes(b"GGUF and no more")
    with pytest.raises(ConfigError, match=r"model\.path=.* several GGUF files; name one of them: a.Q4_K.gguf, a.Q8"):
        place(tmp_path)
    with pytest.raises(ConfigError, match=r"model\.path: .*a\.Q8_0\.gguf cannot be read"):
        place(tmp_path / "a.Q8_0.gguf")
    assert not list(cache.rglob("*a.Q8_0*"))
    pretend(monkeypatch, gguf="0.19", transformers="5.18.0")
    wrong = r"needs accelerate>=1\.0 and transformers>=5\.19, .* pip install 'rollcast-engine\[gguf\]'"
    with pytest.raises(ConfigError, match=wrong):
        place(tmp_path / "a.Q8_0.gguf")

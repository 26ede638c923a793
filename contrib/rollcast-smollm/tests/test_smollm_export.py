"""The export of a trained model in other programs: plain transformers, and GGUF's own package and back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rollcast.contracts.engine import ModelConfig
from rollcast.contracts.storage import NodeCopies

pytestmark = pytest.mark.long
PROMPT = [{"role": "user", "content": "Name three animals that live in the sea."}]


@pytest.fixture(scope="module")
def export(one_step: Callable[..., dict[str, float]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that a run of one step exports."""
    folder = tmp_path_factory.mktemp("run")
    one_step(folder, "runtime=local", "trainer.export=true", "actor.optim.lr=1e-4", "actor.optim.lr_warmup_steps=0")
    return folder / "export"


def greedy(folder: Path) -> list[int]:
    """What plain transformers answers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    inputs = tokenizer.apply_chat_template(PROMPT, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, do_sample=False, max_new_tokens=24)
    return list(map(int, output[0, inputs["input_ids"].shape[1] :]))


def write_gguf(folder: Path, start: Path, path: Path) -> None:
    """Write the weights of a folder into a file by llama.cpp's own package, with all that ``start`` says of the model.

    llama.cpp's attention rotates neighbouring numbers of a head, not halves; its files have queries and keys in this
    order.
    """
    import gguf
    from transformers import AutoConfig

    config: Any = AutoConfig.from_pretrained(folder)
    reader = gguf.GGUFReader(start)
    writer = gguf.GGUFWriter(path, "llama")
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            kind = field.types[0]
            part = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), kind, part)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, weight in load_file(folder / "model.safetensors").items():
        count = heads.get(name.split(".")[-2])
        if count is not None:
            weight = weight.view(count, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
        writer.add_tensor(str(names.get_name(name, (".weight",))), weight.contiguous().float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_plain_transformers_and_gguf_give_the_same_tokens(
    export: Path, model: Path, gguf: Path, tmp_path: Path
) -> None:
    expected = greedy(export)
    assert expected != greedy(model)  # it has been trained
    write_gguf(export, gguf, tmp_path / "trained.gguf")
    back = Path(NodeCopies().place(ModelConfig(path=str(tmp_path / "trained.gguf")), "model").path)
    for name, weight in load_file(export / "model.safetensors").items():
        assert torch.equal(load_file(back / "model.safetensors")[name], weight), name
    assert greedy(back) == expected

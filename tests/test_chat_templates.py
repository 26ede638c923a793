"""Templates of many shapes: what is trained, extended and continued is what transformers renders in full."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rollcast.errors import DataError, RendererError
from rollcast_agents.contracts.renderer import RendererSetup

pytest.importorskip("rollcast_agents")
pytest.importorskip("rollcast_data")
from rollcast_agents.renderers.chat_template import ChatTemplateRenderer
from rollcast_data.conversations import ConversationDataset
from rollcast_data.prompts import PromptDataset

SPECIAL = ["<eos>", "<bos>", "<pad>", "<|end|>", "<|start|>", "<|eot|>", "<|user|>"]
OPENS = "{% if add_generation_prompt %}[a]{% endif %}"
LOOP = "{{ bos_token }}{% for m in messages %}"
STRICT = (
    "{% for m in messages %}{% if m.role == 'system' or (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}"
)
TEMPLATES = {
    "chatml": "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}",
    "llama2": STRICT + "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token }}[I] {{ m.content.strip() }} [/I]"
    "{% else %} {{ m.content.strip() }} {{ eos_token }}{% endif %}{% endfor %}",
    "llama3": LOOP + "<|start|>{{ m.role }}<|user|>\n\n{{ m.content | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|user|>\n\n{% endif %}",
    "gemma": STRICT
    + LOOP
    + "<|start|>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|start|>model\n{% endif %}",
    "mistral": STRICT
    + LOOP
    + "{% if m.role == 'user' %}[I] {{ m.content }}[/I]{% else %} {{ m.content }}{{ eos_token }}"
    "{% endif %}{% endfor %}",
    "phi": "{% for m in messages %}<|{{ m.role[0] }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|a|>\n{% else %}{{ eos_token }}{% endif %}",
    "nothing": LOOP + "[{{ m.role[0] }}]{{ m.content }}{% endfor %}" + OPENS,
    "newline": LOOP + "[{{ m.role[0] }}]{{ m.content }}\n{% endfor %}" + OPENS,
    "two tokens": LOOP + "[{{ m.role[0] }}]{{ m.content }}<|end|><|eot|>{% endfor %}" + OPENS,
    "text and token": LOOP + "[{{ m.role[0] }}]{{ m.content }} END<|end|>\n{% endfor %}" + OPENS,
    "role token ends": LOOP + "{{ '<|user|>' if m.role == 'user' else '<|start|>' }}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>{% endif %}",
    "strips thinking": LOOP
    + "[{{ m.role[0] }}]{{ m.content if loop.last else m.content.split('</think>')[-1] }}<|end|>"
    "{% endfor %}" + OPENS,
}
TALK = [
    {"role": role, "content": text}
    for role, text in (("user", "a"), ("assistant", "b and c"), ("user", "d"), ("assistant", "</think>f{x}"))
]


def write_tokenizer(folder: Path, template: str) -> PreTrainedTokenizerFast:
    characters = [chr(code) for code in range(32, 127)] + ["\n"]
    tokenizer = Tokenizer(models.WordLevel({t: i for i, t in enumerate([*SPECIAL, *characters])}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<eos>",
        bos_token="<bos>",
        pad_token="<pad>",
        additional_special_tokens=SPECIAL[3:],
        chat_template=template,
    )
    fast.save_pretrained(folder)
    return fast


@pytest.fixture(scope="module", params=list(TEMPLATES))
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any, Any]:
    folder = tmp_path_factory.mktemp("template")
    tokenizer = write_tokenizer(folder, TEMPLATES[request.param])
    return request.param, tokenizer, ChatTemplateRenderer(RendererSetup(str(folder)))


def full(tokenizer: Any, messages: list[dict[str, str]], opens: bool = False) -> str:
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=opens))


def rows_of(path: Path, tokenizer: Any, row: dict[str, Any]) -> list[Any]:
    path.write_text(json.dumps(row) + "\n")
    dataset = ConversationDataset([path], tokenizer, {})
    return [dataset[number] for number in range(len(dataset))]


def trained_texts(tokenizer: Any, row: Any) -> list[str]:
    texts, run = [], []
    for token, trained in zip([*row.response_ids, 0], [*row.trained, False], strict=True):
        if trained:
            run.append(token)
        elif run:
            texts.append(tokenizer.decode(run))
            run = []
    return texts


def test_trained_conversations_are_what_the_template_renders(kind: Any, tmp_path: Path) -> None:
    name, tokenizer, _ = kind
    rows = rows_of(tmp_path / "rows.jsonl", tokenizer, {"messages": TALK})
    adds_end = name in ("nothing", "newline", "role token ends")
    replies = [text for row in rows for text in trained_texts(tokenizer, row)]
    assert len(replies) == 2
    for text, message in zip(replies, (TALK[1], TALK[3]), strict=True):
        assert message["content"] in text
        stops = [token for token in tokenizer(text, add_special_tokens=False)["input_ids"] if token < len(SPECIAL)]
        assert len(stops) == 1
        assert text.endswith(SPECIAL[stops[0]])
    for row in rows:
        ids = [*row.prompt_ids, *row.response_ids]
        plain = [token for token in ids if not adds_end or token != tokenizer.eos_token_id]
        whole = [full(tokenizer, TALK[:count]) for count in (2, 4)]
        assert any(text.startswith(tokenizer.decode(plain)) for text in whole), tokenizer.decode(ids)
    if name != "strips thinking":
        assert len(rows) == 1


def test_extended_contexts_are_what_the_template_renders(kind: Any, tmp_path: Path) -> None:
    name, tokenizer, renderer = kind
    trained = trained_texts(tokenizer, rows_of(tmp_path / "rows.jsonl", tokenizer, {"messages": TALK[:2]})[0])[0]
    stop = tokenizer(trained, add_special_tokens=False)["input_ids"][-1]
    assert renderer.stop_token_ids[0] == stop
    start = renderer.start(TALK[:1])
    assert renderer.decode(start) == full(tokenizer, TALK[:1], opens=True)
    adds_end = name in ("nothing", "newline", "role token ends")
    expected = full(tokenizer, TALK[:3], opens=True)
    for said in (trained, "b and c" + SPECIAL[stop], "b and c"):
        ids = np.concatenate([start, renderer.encode(said)])
        extended = renderer.extend(ids, TALK[:3])
        assert extended is not None
        assert np.array_equal(extended[: len(ids)], ids)
        shown = renderer.decode(extended)
        shown = shown.replace("<eos>", "") if adds_end else shown
        assert shown.replace(" ", "").replace("END", "") == expected.replace(" ", "").replace("END", "")
        if said == trained:
            assert shown == expected


def test_prefills_are_continued_as_transformers_does(kind: Any, tmp_path: Path) -> None:
    name, tokenizer, renderer = kind
    prefill = [TALK[0], {"role": "assistant", "content": "b and"}]
    expected = str(tokenizer.apply_chat_template(prefill, tokenize=False, continue_final_message=True))
    assert expected.endswith("b and")
    path = tmp_path / "prefill.jsonl"
    path.write_text(json.dumps({"prompt": prefill, "ground_truth": ""}) + "\n")
    assert tokenizer.decode(list(PromptDataset([path], tokenizer, {})[0].input_ids)) == expected
    start = renderer.start(prefill)
    assert renderer.decode(start) == expected
    empty = renderer.start([TALK[0], {"role": "assistant", "content": ""}])
    assert renderer.decode(empty) == full(tokenizer, TALK[:1], opens=True)
    with pytest.raises(RendererError, match="ends with tool calls"):
        renderer.start([TALK[0], {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}])
    # The reply that continues it is trained without it, and the next turn follows both as one message.
    row = {"prompt": prefill, "completion": [{"role": "assistant", "content": " c"}, *TALK[2:]]}
    rows = rows_of(tmp_path / "rows.jsonl", tokenizer, row)
    assert tokenizer.decode(list(rows[0].prompt_ids)) == expected
    assert trained_texts(tokenizer, rows[0])[0].startswith(" c")
    ids = np.concatenate([start, renderer.encode(" c"), renderer.stop_token_ids[:1]])
    for messages in ([*prefill, {"role": "assistant", "content": " c"}, TALK[2]], TALK[:3]):
        shown = renderer.decode(renderer.extend(ids, messages))
        shown = shown.replace("<eos>", "") if name in ("nothing", "newline", "role token ends") else shown
        after = full(tokenizer, TALK[:3], opens=True)
        assert shown.replace(" ", "").replace("END", "") == after.replace(" ", "").replace("END", "")


def test_refusals_name_the_row_or_the_template(tmp_path: Path) -> None:
    system = [{"role": "system", "content": "s"}, *TALK]
    silent = "{% for m in messages %}{{ m.content if m.role == 'user' }}<eos>{% endfor %}"
    for template, messages, says in (
        (TEMPLATES["gemma"], system, "roles must alternate"),
        (silent, TALK, "does not write the content of a reply"),
    ):
        folder = tmp_path / says[:5]
        tokenizer = write_tokenizer(folder, template)
        with pytest.raises(DataError, match=rf"rows\.jsonl:1: .*{says}"):
            rows_of(tmp_path / "rows.jsonl", tokenizer, {"messages": messages})
        renderer = ChatTemplateRenderer(RendererSetup(str(folder)))
        with pytest.raises(RendererError, match=says):
            renderer.extend(np.ones(3, np.int32), messages[:-1])


def test_a_template_without_tools_is_no_silent_loss(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tool = {"type": "function", "function": {"name": "look_up", "description": "", "parameters": {"type": "object"}}}
    call = {"id": "1", "type": "function", "function": {"name": "look_up", "arguments": {"key": "x"}}}
    tokenizer = write_tokenizer(tmp_path / "model", TEMPLATES["chatml"])
    renderer = ChatTemplateRenderer(RendererSetup(str(tmp_path / "model")))
    renderer.start(TALK[:1])
    assert not caplog.records
    for _ in range(2):
        renderer.start(TALK[:1], [tool])
    (warning,) = caplog.messages
    assert "does not write the tools, so prompts tell the model nothing of look_up" in warning
    talk = [TALK[0], {"role": "assistant", "content": "", "tool_calls": [call]}]
    with pytest.raises(DataError, match=r"rows\.jsonl:1: message 1 .* does not write its tool call of 'look_up'"):
        rows_of(tmp_path / "rows.jsonl", tokenizer, {"messages": talk})

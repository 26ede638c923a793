from __future__ import annotations

import logging
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast, Qwen2Config

from rollcast.errors import ConfigError
from rollcast_data.images import expand_images
from rollcast_data.tokenizer import load_tokenizer, read_stop_token_ids

Make = Callable[..., PreTrainedTokenizerFast]


def test_loads_and_pads_on_the_left(tmp_path: Path, make_tokenizer: Make) -> None:
    made = make_tokenizer()
    made.padding_side = "right"
    made.save_pretrained(str(tmp_path))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.padding_side == "left"
    assert tokenizer.pad_token == "<pad>"
    assert tokenizer("ab")["input_ids"] == made("ab")["input_ids"]


def test_tokenizer_json_is_taken_as_it_stands(tmp_path: Path, make_tokenizer: Make) -> None:
    Qwen2Config().save_pretrained(str(tmp_path))
    made = make_tokenizer()
    made.save_pretrained(str(tmp_path))
    assert load_tokenizer(tmp_path)("a b\n")["input_ids"] == made("a b\n")["input_ids"]
    assert len(made("a b\n")["input_ids"]) == 4


def test_pads_with_the_end_token_if_there_is_no_other(
    tmp_path: Path, make_tokenizer: Make, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "rollcast.data")
    make_tokenizer(pad=False).save_pretrained(str(tmp_path))
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    assert "has no pad token; padding with its end token '<eos>'" in caplog.text


def test_folders_that_hold_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.path: .*nowhere does not exist"):
        load_tokenizer(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="is a file"):
        load_tokenizer(tmp_path / "config.json")
    with pytest.raises(ConfigError, match=r"has no tokenizer .*it holds: config\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="does not load"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_without_an_end_token(tmp_path: Path, make_tokenizer: Make) -> None:
    make_tokenizer(eos=False).save_pretrained(str(tmp_path))
    with pytest.raises(ConfigError, match="has no eos_token"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("text", "others"),
    [
        (None, []),
        ('{"temperature": 0.6}', []),
        ('{"eos_token_id": null}', []),
        ('{"eos_token_id": 7}', [7]),
        ('{"eos_token_id": [7, EOS, 5, 7], "top_p": 0.8}', [7, 5]),
    ],
)
def test_stop_tokens_of_tokenizer_and_generation_config(
    tmp_path: Path, make_tokenizer: Make, text: str | None, others: list[int]
) -> None:
    tokenizer = make_tokenizer()
    if text is not None:
        (tmp_path / "generation_config.json").write_text(text.replace("EOS", str(tokenizer.eos_token_id)))
    assert read_stop_token_ids(tmp_path, tokenizer) == (tokenizer.eos_token_id, *others)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", r"generation_config\.json is not a JSON object"),
        ("[]", r"generation_config\.json is not a JSON object"),
        ('{"eos_token_id": "<eos>"}', r"eos_token_id in .*generation_config\.json is '<eos>'"),
        ('{"eos_token_id": [1, true]}', r"is \[1, True\]; it has to be a token id or a list of them"),
        ('{"eos_token_id": [1, -2]}', r"is \[1, -2\]"),
    ],
)
def test_generation_configs_without_ids(tmp_path: Path, make_tokenizer: Make, text: str, says: str) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ConfigError, match=rf"model\.path: .*{says}"):
        read_stop_token_ids(tmp_path, make_tokenizer())


def test_a_name_of_the_hub_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ConfigError, match=r"hf download Qwen/Qwen2\.5-0\.5B --local-dir Qwen2\.5-0\.5B, and set model\.path"
    ):
        load_tokenizer("Qwen/Qwen2.5-0.5B")


@pytest.mark.parametrize("trusts", [False, True])
def test_the_image_processor_is_trusted_as_the_tokenizer_is(
    tmp_path: Path, make_tokenizer: Make, monkeypatch: pytest.MonkeyPatch, trusts: bool
) -> None:
    seen: list[tuple[str, bool]] = []

    class Inputs:
        def __init__(self, path: str, trust_remote_code: bool = False) -> None:
            seen.append((path, trust_remote_code))

    monkeypatch.setattr("rollcast_data.vision.model_inputs.ImageInputs", Inputs)
    make_tokenizer().save_pretrained(str(tmp_path))
    tokenizer = pickle.loads(pickle.dumps(load_tokenizer(tmp_path, trust_remote_code=trusts)))
    assert expand_images([], [], {}, tokenizer) == []
    assert seen == [(str(tmp_path), trusts)]
    tokenizer.save_pretrained(str(tmp_path / "saved"))
    assert "trust" not in (tmp_path / "saved" / "tokenizer_config.json").read_text()

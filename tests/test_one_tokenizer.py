"""One way to a tokenizer: every part of a run reads the folder through the same loader."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rollcast_agents.contracts.renderer import RendererSetup
from rollcast_data.tokenizer import read_tokenizer

pytest.importorskip("rollcast_agents")
pytest.importorskip("rollcast_data")
from rollcast_agents.renderers.chat_template import ChatTemplateRenderer
from rollcast_data.prompts import PromptDataset
from rollcast_data.tokenizer import load_tokenizer
from rollcast_serving.openai_api import _Chat
from rollcast_serving.stops import StopStrings
from rollcast_testing.tiny import CHAT_TEMPLATE, tiny_model_folder

ROOT = Path(__file__).resolve().parents[1]
LOADER = ROOT / "plugins/rollcast-data/src/rollcast_data/tokenizer.py"
#: Reads a file's tokenizer once, to write the folder that the loader reads.
CONVERSION = "core/src/rollcast/contracts/gguf.py"
#: The class of the processor of images, and a test kit's reference for it.
IMAGES = {"plugins/rollcast-data/src/rollcast_data/vision/model_inputs.py"}
CHAT = [{"role": "user", "content": "what is 1 + 2"}]


def _sources() -> list[Path]:
    found = [*ROOT.glob("core/src/**/*.py"), *ROOT.glob("plugins/*/src/**/*.py"), *ROOT.glob("contrib/*/src/**/*.py")]
    return [*found, *ROOT.glob("contrib/flat-grpo/*.py")]


def test_no_other_code_chooses_the_class_of_a_tokenizer_or_processor() -> None:
    sources = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in _sources()}
    loads = re.compile(
        r"\b(Auto(?:Tokenizer|Processor)\b|\w*Tokenizer\w*\.from_pretrained|\w*Processor\.from_pretrained)"
    )
    users = {name for name, text in sources.items() if loads.search(text)}
    assert users == {LOADER.relative_to(ROOT).as_posix(), CONVERSION}
    assert {name for name, text in sources.items() if "AutoImageProcessor" in text and "/testing" not in name} >= IMAGES


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of type Qwen2 with a tokenizer of another kind, which AutoTokenizer of transformers 5 misreads."""
    return tiny_model_folder(tmp_path_factory.mktemp("model") / "m", chat_template=CHAT_TEMPLATE, weights=False)


def test_agents_gateway_and_stops_see_the_tokens_of_the_dataset(folder: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(folder)
    text = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    expected = tokenizer.encode(text, add_special_tokens=False)
    assert " " in tokenizer.decode(expected)
    file = tmp_path / "rows.json"
    file.write_text(f'[{{"prompt": {str(CHAT).replace(chr(39), chr(34))}, "ground_truth": "3"}}]')
    assert list(PromptDataset([file], tokenizer, {})[0].input_ids) == expected
    assert ChatTemplateRenderer(RendererSetup(str(folder))).start(CHAT).tolist() == expected
    assert _Chat(str(folder), False).conversation(CHAT) == expected
    assert StopStrings(str(folder))._text(expected) == text
    assert read_tokenizer(folder).encode(text, add_special_tokens=False) == expected


def test_the_folders_own_code_runs_only_if_allowed(folder: Path, tmp_path: Path) -> None:
    """A tokenizer whose class is Python code of the folder loads in each part with the key, and in none without."""
    own = tmp_path / "own"
    own.mkdir()
    for file in [path for path in folder.iterdir() if path.name != "config.json"]:
        (own / file.name).write_bytes(file.read_bytes())
    (own / "own_code.py").write_text(
        "from transformers import PreTrainedTokenizerFast\n\n\nclass OwnTokenizer(PreTrainedTokenizerFast):\n    pass\n"
    )
    settings = own / "tokenizer_config.json"
    declared = settings.read_text(encoding="utf-8")
    own_class = '"auto_map": {"AutoTokenizer": [null, "own_code.OwnTokenizer"]},'
    settings.write_text(declared.replace("{", "{" + own_class, 1).replace("TokenizersBackend", "OwnTokenizer"))
    parts = {
        "dataset": lambda trust: load_tokenizer(own, trust),
        "renderer": lambda trust: ChatTemplateRenderer(RendererSetup(str(own), trust_remote_code=trust))._tokenizer,
        "gateway": lambda trust: _Chat(str(own), trust).tokenizer,
        "stops": lambda trust: StopStrings(str(own), trust)._tokenizer,
    }
    for name, load in parts.items():
        with pytest.raises(ValueError, match="trust_remote_code"):
            load(False)
        assert type(load(True)).__name__ == "OwnTokenizer", name

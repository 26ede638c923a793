import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rollcast_agents.contracts.renderer import RendererSetup
from rollcast_agents.testing import RendererSuite
from rollcast_my_plugin import MyPlugin


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tokenizer of single characters; return your model's folder instead."""
    characters = ["<eos>", "\n", *map(chr, range(32, 127))]
    tokenizer = Tokenizer(models.WordLevel({text: number for number, text in enumerate(characters)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"<eos>|[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    folder = tmp_path_factory.mktemp("model")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(folder)
    return str(folder)


class TestMyPlugin(RendererSuite):
    name = "my_plugin"
    replies = ("four", "", " two  spaces\n", 'CALL {"name": "add", "arguments": {"a": 2}}', "CALL {")
    always_extends = True

    @pytest.fixture
    def model_path(self, folder):
        return folder


def test_calls_are_read(folder):
    renderer = MyPlugin(RendererSetup(folder))
    reply = renderer.parse(renderer.encode('I add.\nCALL {"name": "add", "arguments": {"a": 2}}'))
    assert reply.text == "I add."
    assert (reply.tool_calls[0].name, reply.tool_calls[0].arguments) == ("add", {"a": 2})
    assert renderer.parse(renderer.encode("CALL add")).tool_calls[0].error

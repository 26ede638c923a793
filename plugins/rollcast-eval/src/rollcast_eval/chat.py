"""``rollcast chat``: a conversation with a model in the terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollcast.contracts.command import ConfigDir, hide_library_bars, print_lines, show_progress

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from rollcast_data.schemas import DataConfig
    from rollcast_serving.replicas import Replicas

__all__ = ["ChatSession", "chat", "chat_app", "find_model"]

chat_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
_CLEAR = "/clear"


@chat_app.command()
def chat(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Run directory, model folder, GGUF file, or the URL of one.")
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="OVERRIDES", help="Keys such as rollout=vllm or rollout.temperature=0.7."),
    ] = None,
    system: Annotated[str | None, typer.Option("--system", help="System message of the conversation.")] = None,
    opening: Annotated[
        Path | None,
        typer.Option("--opening", metavar="PROMPTS", help="Begin as the first prompt of a JSONL or Parquet file does."),
    ] = None,
    config_dir: ConfigDir = None,
) -> None:
    """Talk to a model, whose replies are greedy unless rollout.temperature is set.

    With --opening, all messages of that prompt but its last begin the conversation: a system message and examples. The
    line /clear starts a new conversation. The end of the input, Ctrl-D, ends the command.
    """
    from rollcast import build_section, format_override
    from rollcast.errors import RollcastError
    from rollcast_data.schemas import DataConfig
    from rollcast_eval.composition import compose_samples

    path = format_override("model.path", find_model(model))
    composed = compose_samples([path, "rollout.temperature=0", *(overrides or ())], config_dir)
    composed.load_plugins()
    hide_library_bars()
    data = build_section(DataConfig, composed.config.data, "data")
    session = ChatSession(composed.config, _read_opening(system, opening, data))
    with contextlib.ExitStack() as stack:
        with show_progress("starting the model"):
            stack.enter_context(session)
        for text in _read_lines():
            if text == _CLEAR:
                session.clear()
                continue
            try:
                print_lines(session.ask(text))
            except RollcastError as error:
                print_lines(f"error: {error}; {_CLEAR} starts a new conversation", stderr=True)


def find_model(path: str) -> str:
    """Return the path of a model; for a run directory, of the model that it has exported.

    Raises:
        ConfigError: nothing is there, or the run has exported no model; says how to do it.
    """
    from rollcast.contracts.files import find_newest_checkpoint
    from rollcast.contracts.storage import is_url
    from rollcast.errors import ConfigError

    if is_url(path):
        return path
    place = Path(path)
    if not place.exists():
        raise ConfigError(f"there is no model, run directory or file {path}")
    if not (place / "config.yaml").is_file():
        return path
    if (place / "export").is_dir():
        return str(place / "export")
    checkpoint = find_newest_checkpoint(place)
    how = f"rollcast export {checkpoint} {place / 'export'}" if checkpoint else "it has no checkpoint either"
    raise ConfigError(f"the run {path} has exported no model ({place / 'export'}); {how}")


def _read_lines() -> Iterator[str]:
    """Yield the lines of the standard input that are not blank, with a prompt and line editing on a terminal."""
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):  # not on Windows
            import readline  # noqa: F401  # gives `input` a history
    while True:
        try:
            text = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        if text:
            yield text


def _read_opening(system: str | None, prompts: Path | None, data: DataConfig) -> list[dict[str, Any]]:
    """Return the messages that every conversation begins with."""
    from rollcast.errors import ConfigError, DataError
    from rollcast_data.encoding import raw_prompt
    from rollcast_data.files import read_rows

    if prompts is None:
        return [] if system is None else [{"role": "system", "content": system}]
    if system is not None:
        raise ConfigError("--system and --opening both begin the conversation; give one of them")
    row = next(iter(read_rows(prompts)), None)
    if row is None:
        raise DataError(f"{prompts} has no row whose prompt --opening could take")
    prompt = raw_prompt(row, data)
    if isinstance(prompt, str):
        raise DataError(f"{row.location}: the prompt is a string, and --opening needs one of messages")
    return prompt[:-1]


class ChatSession:
    """A conversation with a model; a context, in which its replica runs.

    Args:
        config: config composed with ``trainer=sample``.
        opening: messages that every conversation begins with.

    Raises:
        RollcastError: a section is not usable, or the model has no tokenizer.
    """

    def __init__(self, config: DictConfig, opening: Sequence[dict[str, Any]] = ()) -> None:
        from rollcast_data.schemas import DataConfig
        from rollcast_eval.sampled_model import SampledModel
        from rollcast_eval.schemas import SampleConfig

        self._served = SampledModel(config)
        self._data: DataConfig = self._served.section("data", DataConfig)
        self._sample: SampleConfig = self._served.section("sample", SampleConfig)
        self._tokenizer = self._served.load_tokenizer()
        self._opening = list(opening)
        self._replicas: Replicas | None = None
        self._stack = contextlib.ExitStack()
        self._asked = 0
        self.clear()

    def clear(self) -> None:
        """Start a new conversation."""
        self.messages: list[dict[str, Any]] = list(self._opening)

    def __enter__(self) -> ChatSession:
        self._replicas, _, _ = self._stack.enter_context(self._served.serve(self._sample.seed))
        return self

    def __exit__(self, *error: object) -> None:
        self._replicas = None
        self._stack.close()

    def ask(self, text: str) -> str:
        """Return the reply to a message of the user; both become part of the conversation.

        Raises:
            RollcastError: the conversation cannot be answered, for example because it is too long; the message is
                dropped.
        """
        reply = self._reply([*self.messages, {"role": "user", "content": text}])
        self.messages += [{"role": "user", "content": text}, {"role": "assistant", "content": reply}]
        return reply

    def _reply(self, messages: Sequence[dict[str, Any]]) -> str:
        import torch

        from rollcast.protocol import DataProto
        from rollcast_data.encoding import encode_prompts, join_ids
        from rollcast_data.files import Row
        from rollcast_rewards.scoring import GeneratedSamples
        from rollcast_serving.requests import configured_sampling

        if self._replicas is None:
            raise RuntimeError("ChatSession.ask was called outside its context")
        row = Row({self._data.prompt_key: list(messages)}, Path("conversation"), len(messages))
        ids = encode_prompts([row], self._tokenizer, self._data)
        seed = torch.tensor([self._sample.seed + self._asked])
        self._asked += 1
        sampling = configured_sampling(self._served.rollout, self._data.max_response_length)
        prompts = DataProto.from_dict({"prompts": join_ids(ids).column(), "seed": seed})
        answer = self._replicas.run(self._replicas.respond(prompts, sampling))
        return GeneratedSamples(answer, self._tokenizer)[0].response

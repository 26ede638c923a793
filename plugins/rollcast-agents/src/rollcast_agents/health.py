"""Health check of a model's chat template: does a longer conversation begin with the tokens of the shorter one?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rollcast.contracts.health import BaseHealthCheck, Finding, HealthSetup, ok, problem, warning
from rollcast.errors import PluginError, RendererError
from rollcast_agents.contracts.renderer import BaseRenderer, RendererSetup, renderers
from rollcast_agents.prefix import CONVERSATIONS, REPLIES, Conversation, Extension, extend_each

__all__ = ["RendererCheck", "judge_prefix"]

#: Templates that drop earlier thinking change only a reply that has some.
_THINKING = "<think>\nadd them\n</think>\n\nfour"


class RendererCheck(BaseHealthCheck):
    """The chat template of ``model.path``, through the renderer that agents use."""

    subject = "chat template"

    def run(self, setup: HealthSetup) -> Iterator[Finding]:
        """Extend conversations with and without tools behind replies of every kind."""
        path, name = setup.get("model.path"), setup.get("agent.renderer", "chat_template")
        if path is None or not Path(str(path)).is_dir():
            return
        used = setup.get("agent.loop") is not None
        options, trust = setup.get("agent.renderer_kwargs", {}), setup.get("model.trust_remote_code", False)
        try:
            renderer = renderers.get(name, requested_by="agent.renderer")(
                RendererSetup(str(path), setup.get("agent.format", ""), options, trust)
            )
        except (RendererError, PluginError, OSError, ValueError) as error:
            # Transformers raises errors of the last two kinds for a folder that it cannot read.
            text = " ".join(str(error).split())
            fix = "model.path of a chat model; or write chat_template.jinja into the folder; or another agent.renderer"
            yield problem(name, text, fix) if used else warning(name, f"{text} (agents need one)", fix)
            return
        yield judge_prefix(name, renderer)


def judge_prefix(name: str, renderer: BaseRenderer) -> Finding:
    """Return the finding about whether a renderer keeps prefixes."""
    plain, with_tools = CONVERSATIONS[:2], CONVERSATIONS[2:]
    try:
        extensions = list(extend_each(renderer, plain, (*REPLIES, _THINKING)))
        extensions += _extend_with_tools(renderer, with_tools)
    except RendererError as error:
        fix = "agent.renderer_kwargs that the template asks for, or another agent.renderer"
        return problem("prefix", f"{name} refuses a conversation: {error}", fix)
    changed = [extension for extension in extensions if extension.extended is not None and not extension.keeps]
    if changed:
        text = (
            f"{name} changes tokens that are there, {_describe(changed)}; training would see others than were sampled"
        )
        return problem("prefix", text, "another agent.renderer, and report it to this one's authors")
    forks = [extension for extension in extensions if extension.extended is None]
    if not forks:
        return ok("prefix", f"{name} kept every token in {len(extensions)} of {len(extensions)} conversations")
    fix = (
        "use a template that renders earlier turns as they were (edit chat_template.jinja in model.path), a renderer "
        "of the model's family (agent.renderer=library), or accept one more row of training for each such turn"
    )
    text = f"{name} does not keep earlier turns as they were in {len(forks)} of {len(extensions)} conversations, "
    return warning("prefix", f"{text}{_describe(forks)}: each such turn forks the session", fix)


def _extend_with_tools(renderer: BaseRenderer, conversations: Sequence[Conversation]) -> list[Extension]:
    try:
        return list(extend_each(renderer, conversations, REPLIES))
    except RendererError:
        return []  # a template without tools; runs that have none do not need them


def _describe(extensions: Sequence[Extension]) -> str:
    first = extensions[0]
    return f"such as a message of {' and '.join(first.roles)} behind the reply {first.reply!r}"

"""Stop strings: found token by token, with the same rule for all engines.

The token that completes a stop string is the last one of the output and is not truncated; see
:class:`~rollcast.contracts.rollout.SamplingParams`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from rollcast.contracts.tokenizer import read_tokenizer
from rollcast.errors import RequestError

__all__ = ["StopMatcher", "StopStrings", "count_until_stop"]

#: Replacement character for bytes that do not yet decode.
_INCOMPLETE = "\ufffd"


class StopMatcher:
    """The end of one sequence's text, as far back as a stop string could begin.

    A token's text may depend on the tokens before it, and a character may take several tokens. So the tokens since the
    last complete text are decoded together with the few before them.

    Args:
        decode: returns the text of token ids.
        stops: stop strings, none empty.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str]) -> None:
        self._decode, self._stops = decode, stops
        self._reach = max(map(len, stops)) - 1
        self._ids: list[int] = []
        self._read = 0
        self._tail = ""

    def add(self, token: int) -> bool:
        """Return True if this token completes a stop string."""
        self._ids.append(token)
        known = self._decode(self._ids[: self._read]) if self._read else ""
        text = self._decode(self._ids)
        fresh = text.rstrip(_INCOMPLETE)[len(known) :]
        seen = self._tail + fresh
        if not text.endswith(_INCOMPLETE):
            self._tail = seen[len(seen) - self._reach :] if self._reach else ""
            # Keep the new tokens as context of the next ones; older ones are no longer needed.
            self._ids = self._ids[self._read :]
            self._read = len(self._ids)
        return any(stop in seen for stop in self._stops)


def count_until_stop(matcher: StopMatcher, tokens: Sequence[int]) -> int | None:
    """Return the number of tokens to keep, up to the one that completes a stop string; None without a stop string."""
    return next((place + 1 for place, token in enumerate(tokens) if matcher.add(token)), None)


class StopStrings:
    """The matchers of a model; its tokenizer is loaded at the first request with stop strings.

    Args:
        model_path: folder of the tokenizer.
        trust_remote_code: True if code of the folder may run.
    """

    def __init__(self, model_path: str, trust_remote_code: bool = False) -> None:
        self._path, self._trust = model_path, trust_remote_code

    @functools.cached_property
    def _tokenizer(self) -> Any:
        return read_tokenizer(self._path, self._trust)

    def _text(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def check(self, request_id: str, stops: Sequence[str]) -> None:
        """Check that stop strings can be matched.

        Raises:
            RequestError: a stop string is empty, or the model's folder has no tokenizer.
        """
        if not stops:
            return
        if not all(isinstance(stop, str) and stop for stop in stops):
            raise RequestError(f"request {request_id!r}: stop is {list(stops)!r}; stop strings must not be empty")
        try:
            self._text([])
        except (OSError, ValueError, KeyError) as error:
            raise RequestError(
                f"request {request_id!r}: stop strings need the model's tokenizer, but that of {self._path} cannot "
                f"be loaded: {error}"
            ) from error

    def matcher(self, stops: Sequence[str]) -> StopMatcher | None:
        """Return a matcher for one sequence; None without stop strings."""
        return StopMatcher(self._text, stops) if stops else None

"""Stop strings: found token by token, with the same rule for all engines.

The token that completes a stop string is the last one of the output and is not truncated; see
:class:`~rollcast.contracts.rollout.SamplingParams`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from rollcast.errors import RequestError
from rollcast_data.tokenizer import read_tokenizer

__all__ = ["StopMatcher", "StopStrings", "TextPieces", "count_until_stop"]

#: Replacement character for bytes that do not yet decode.
_INCOMPLETE = "\ufffd"


class TextPieces:
    """The text of one sequence, token by token.

    A token's text may depend on the tokens before it, and a character may take several tokens. So the tokens since the
    last complete text are decoded together with the few before them.

    Args:
        decode: returns the text of token ids.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._read = 0

    def add(self, token: int) -> tuple[str, bool]:
        """Return the text since the last complete one, and True if it is complete with this token."""
        self._ids.append(token)
        fresh = self.rest()
        if fresh.endswith(_INCOMPLETE):
            return fresh.rstrip(_INCOMPLETE), False
        # Keep the new tokens as context of the next ones; older ones are no longer needed.
        self._ids = self._ids[self._read :]
        self._read = len(self._ids)
        return fresh, True

    def rest(self) -> str:
        """Return the text since the last complete one, with replacement characters for bytes that do not decode."""
        known = self._decode(self._ids[: self._read]) if self._read else ""
        return self._decode(self._ids)[len(known) :]

    @classmethod
    def split(cls, decode: Callable[[Sequence[int]], str], ids: Sequence[int]) -> list[str]:
        """Return the text of each token; a character of several tokens belongs to the last of them."""
        pieces, texts = cls(decode), []
        for token in ids:
            text, is_complete = pieces.add(int(token))
            texts.append(text if is_complete else "")
        if texts and not is_complete:
            texts[-1] = pieces.rest()
        return texts


class StopMatcher:
    """The end of one sequence's text, as far back as a stop string could begin.

    Args:
        decode: returns the text of token ids.
        stops: stop strings, none empty.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str]) -> None:
        self._pieces, self._stops = TextPieces(decode), stops
        self._reach = max(map(len, stops)) - 1
        self._tail = ""

    def add(self, token: int) -> bool:
        """Return True if this token completes a stop string."""
        fresh, is_complete = self._pieces.add(token)
        seen = self._tail + fresh
        if is_complete:
            self._tail = seen[max(len(seen) - self._reach, 0) :]
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

"""Stop strings are found at the first token that completes one, whatever the tokens."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollcast.errors import RequestError
from rollcast_serving.stops import StopMatcher, StopStrings, count_until_stop

#: Tokens of bytes, as of a byte-level tokenizer: characters of several bytes are cut in the middle.
PIECES = [b"a", b"b", b"ab", b" ", b"ba ", "\u00e9".encode(), b"\xc3", b"\xa9", b"\xe2\x82", b"\xac", b"a\xc3"]


def decode(ids: Sequence[int]) -> str:
    return b"".join(PIECES[token] for token in ids).decode(errors="replace")


@given(
    st.lists(st.integers(0, len(PIECES) - 1), max_size=12),
    st.lists(st.text("ab \u00e9\u20ac", min_size=1, max_size=4), min_size=1, max_size=2),
)
def test_the_first_token_that_completes_a_stop(tokens: list[int], stops: list[str]) -> None:
    ends = range(1, len(tokens) + 1)
    expected = next((end for end in ends if any(stop in decode(tokens[:end]) for stop in stops)), None)
    assert count_until_stop(StopMatcher(decode, stops), tokens) == expected


def test_what_cannot_be_found_is_refused() -> None:
    stops = StopStrings("/no/such/model")
    stops.check("r", ())
    assert stops.matcher(()) is None
    with pytest.raises(RequestError, match="request 'r': stop is"):
        stops.check("r", ("",))
    with pytest.raises(RequestError, match=r"tokenizer, but that of /no/such/model cannot"):
        stops.check("r", ("a",))

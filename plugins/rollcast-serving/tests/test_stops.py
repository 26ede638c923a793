"""Stop strings are found at the first token that completes one, whatever the tokens."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

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


def splits(text: bytes) -> Iterator[list[bytes]]:
    """Yield every split of a text into tokens of one byte and more."""
    for cuts in itertools.product((False, True), repeat=len(text) - 1):
        ends = [place for place, is_cut in enumerate(cuts, 1) if is_cut]
        yield [text[start:end] for start, end in itertools.pairwise((0, *ends, len(text)))]


@pytest.mark.parametrize("strips_blank", [False, True], ids=["bytes", "pieces"])
@pytest.mark.parametrize(
    ("text", "stops"),
    [
        ("stop", ["stop"]),
        ("a stop b", ["stop"]),
        (" aaaaab", ["aaaab"]),
        ("\n\n\n\n\nx", ["\n\n\n\n"]),
        ("xabcdex", ["abcd", "bcde", "e"]),
        ("abcdefgh", ["h", "abcdefg"]),
        ("é€é€", ["é€é"]),
        ("a\U0001f600!b", ["\U0001f600!"]),
        ("ab\u200dcd", ["b\u200dcd"]),
        ("abcabcab", ["abcd"]),
    ],
)
def test_every_split_of_every_stop(text: str, stops: list[str], strips_blank: bool) -> None:
    """Check each split against a reference that decodes all tokens so far, for decoders that keep or drop a first blank."""
    for pieces in splits(text.encode()):

        def decode(ids: Sequence[int], pieces: list[bytes] = pieces) -> str:
            whole = b"".join(pieces[token] for token in ids).decode(errors="replace")
            return whole.removeprefix(" ") if strips_blank else whole

        ends = range(1, len(pieces) + 1)
        expected = next((end for end in ends if any(stop in decode(range(end)) for stop in stops)), None)
        assert count_until_stop(StopMatcher(decode, stops), range(len(pieces))) == expected, (pieces, stops)


def test_what_cannot_be_found_is_refused() -> None:
    stops = StopStrings("/no/such/model")
    stops.check("r", ())
    assert stops.matcher(()) is None
    with pytest.raises(RequestError, match="request 'r': stop is"):
        stops.check("r", ("",))
    with pytest.raises(RequestError, match=r"tokenizer, but that of /no/such/model cannot"):
        stops.check("r", ("a",))

"""Contrast of the report's colours, computed from its style sheet as WCAG 2.2 defines it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import rollcast_report

_CSS = (Path(rollcast_report.__file__).parent / "assets" / "report.css").read_text("utf-8")
_TEXT = 4.5
#: Lines, bars and borders of controls, which carry meaning but no text.
_GRAPHICS = 3.0


def _schemes() -> dict[str, dict[str, str]]:
    blocks = re.findall(r":root\s*\{([^}]*)\}", _CSS)
    light, dark = (
        {name: value.strip() for name, value in re.findall(r"--([\w-]+):\s*([^;]+);", each)} for each in blocks
    )
    return {"light": light, "dark": {**light, **dark}}


def _channels(colour: str) -> tuple[float, ...]:
    digits = colour.lstrip("#")
    values = [int(digits[place : place + 2], 16) / 255 for place in range(0, len(digits), 2)]
    return tuple(values + [1.0] * (4 - len(values)))


def _over(colour: str, ground: str) -> tuple[float, ...]:
    *front, alpha = _channels(colour)
    return tuple(alpha * a + (1 - alpha) * b for a, b in zip(front, _channels(ground), strict=False))


def _luminance(channels: tuple[float, ...]) -> float:
    linear = [each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in channels[:3]]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(front: str, back: str, ground: str) -> float:
    """Return the ratio of a colour on a background that lies on the ground of a card or the page."""
    high, low = sorted((_luminance(_channels(front)), _luminance(_over(back, ground))), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_black_on_white() -> None:
    assert contrast("#000000", "#ffffff", "#ffffff") == pytest.approx(21)
    assert contrast("#767676", "#ffffff", "#ffffff") == pytest.approx(4.54, abs=0.01)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(
    ("front", "back"),
    [
        *[(front, back) for front in ("ink", "soft", "faint") for back in ("page", "card", "code")],
        *[(front, back) for front in ("good", "bad", "warn") for back in (f"{front}-bg", "card")],
        ("page", "ink"),
        ("line", "card"),
    ],
)
def test_text_can_be_read(scheme: str, front: str, back: str) -> None:
    colours = _schemes()[scheme]
    for ground in ("page", "card"):
        assert contrast(colours[front], colours[back], colours[ground]) >= _TEXT, (front, back)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("front", ["line", "control", *(f"s{number}" for number in range(8))])
def test_lines_and_controls_can_be_seen(scheme: str, front: str) -> None:
    colours = _schemes()[scheme]
    for back in ("page", "card"):
        assert contrast(colours[front], colours[back], colours[back]) >= _GRAPHICS


def test_text_has_one_of_these_colours_and_no_opacity() -> None:
    used = set(re.findall(r"(?:^|[{;\s])(?:color|fill):\s*var\(--([\w-]+)\)", _CSS))
    assert used <= {"ink", "soft", "faint", "good", "bad", "warn", "page", "line", "card", *(f"s{n}" for n in range(8))}
    faded = [rule for rule in re.findall(r"([^{}]+)\{[^}]*opacity:", _CSS) if rule.strip() not in _FADED]
    assert faded == []


#: Rules with opacity that colour no text.
_FADED = {".line.faint", ".band"}


def test_lines_of_several_runs_differ_in_more_than_colour() -> None:
    dashes = re.findall(r"\.line\.c\d \{ stroke-dasharray: ([^;]+);", _CSS)
    assert len(dashes) == len(set(dashes)) == 8

"""The data that a report embeds, unpacked as the page's script does it."""

from __future__ import annotations

import base64
import json
import zlib
from html.parser import HTMLParser
from typing import Any

__all__ = ["PackedPage"]


class PackedPage(HTMLParser):
    """Tags of a page, and the index and the details of its explorer."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.index: dict[str, Any] = {}
        self.details: list[dict[str, Any]] = []
        self.text = ""
        self._within = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._within = dict(attrs).get("id") or dict(attrs).get("class") or ""

    def handle_data(self, data: str) -> None:
        if self._within == "explorer-index":
            self.index = _unpack(data)
        elif self._within == "explorer-block":
            self.details += _unpack(data)
        else:
            self.text += data

    def handle_endtag(self, tag: str) -> None:
        self._within = ""


def _unpack(data: str) -> Any:
    return json.loads(zlib.decompress(base64.b64decode(data, validate=True)))

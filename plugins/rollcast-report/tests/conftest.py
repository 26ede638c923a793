"""Tools for the tests of a report: a browser, and the packed data of a page."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the tools

from report_browser import Browser, find_browser
from report_browser import Page as BrowserPage


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    program = find_browser()
    if program is None:
        pytest.skip("there is no Chromium on the path; ROLLCAST_BROWSER may name one")
    with Browser.started(program) as started:
        yield started


@pytest.fixture
def tab(browser: Browser) -> BrowserPage:
    page = browser.new_page()
    page.emulate(1280, 1000)
    return page

"""A driver of headless Chromium over its DevTools pipe, which needs no package and opens no port."""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["Browser", "Page", "find_browser"]

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "microsoft-edge")


def find_browser() -> str | None:
    """Return the path of a browser with the DevTools protocol: ``$ROLLCAST_BROWSER``, or the first on the path."""
    named = os.environ.get("ROLLCAST_BROWSER")
    return named or next((path for name in _NAMES if (path := shutil.which(name))), None)


class Page:
    """A tab of the browser."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session

    def call(self, method: str, **params: Any) -> Any:
        """Call a method of the protocol on this tab."""
        return self._browser.call(method, params, self._session)

    def open(self, path: Path) -> float:
        """Load a file; return the seconds until its load event."""
        start = time.perf_counter()
        self.call("Page.navigate", url=path.resolve().as_uri())
        self.wait("document.readyState === 'complete' && location.protocol === 'file:'")
        return time.perf_counter() - start

    def run(self, script: str) -> Any:
        """Return the value of a JavaScript expression; a promise is awaited."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(json.dumps(answer["exceptionDetails"])[:2000])
        return answer["result"].get("value")

    def wait(self, condition: str, seconds: float = 60.0) -> None:
        """Wait until an expression is true.

        Raises:
            TimeoutError: it did not become true in time.
        """
        end = time.monotonic() + seconds
        while not self.run(f"Boolean({condition})"):
            if time.monotonic() > end:
                raise TimeoutError(condition)
            time.sleep(0.02)

    def press(self, key: str, modifiers: int = 0) -> None:
        """Press a key, such as ``ArrowDown`` or ``a``; as a person would, through the browser."""
        codes = {"Tab": 9, "Enter": 13, "Escape": 27, " ": 32, "PageUp": 33, "PageDown": 34, "End": 35, "Home": 36}
        codes |= {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}
        text = {"Enter": "\r", " ": " "}.get(key, key if len(key) == 1 else "")
        shared = {"key": key, "modifiers": modifiers, "windowsVirtualKeyCode": codes.get(key, ord(key[0].upper()))}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **shared)
        self.call("Input.dispatchKeyEvent", type="keyUp", **shared)

    def emulate(self, width: int, height: int, **features: str) -> None:
        """Set the size of the window, and media features such as ``prefers_color_scheme="dark"``."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        listed = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        self.call("Emulation.setEmulatedMedia", features=listed)

    def screenshot(self, path: Path, whole: bool = False) -> None:
        """Write a PNG of the window, or of the whole page."""
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(answer["data"]))


class Browser:
    """A headless browser with a fresh profile."""

    def __init__(self, program: str, profile: Path) -> None:
        their_in, self._out = os.pipe()
        self._in, their_out = os.pipe()
        command = [program, "--headless=new", "--remote-debugging-pipe", f"--user-data-dir={profile}"]
        command += ["--no-first-run", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1280,1000"]
        if hasattr(os, "geteuid") and os.geteuid() == 0:
            command.append("--no-sandbox")  # the sandbox refuses to start as root

        def connect() -> None:
            # The protocol is read from descriptor 3 and written to 4; the pipes may have those numbers themselves.
            reading, writing = os.dup(their_in), os.dup(their_out)
            os.dup2(reading, 3)
            os.dup2(writing, 4)

        self.process = subprocess.Popen(
            command, preexec_fn=connect, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(their_in)
        os.close(their_out)
        self._numbers = itertools.count(1)
        self._buffer = b""

    @classmethod
    @contextmanager
    def started(cls, program: str) -> Iterator[Browser]:
        """Start a browser, and end it after the block."""
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
            browser = cls(program, Path(profile))
            try:
                yield browser
            finally:
                browser.process.terminate()
                try:
                    browser.process.wait(20)
                except subprocess.TimeoutExpired:
                    browser.process.kill()
                    browser.process.wait()
                os.close(browser._in)
                os.close(browser._out)

    def new_page(self) -> Page:
        """Open a tab."""
        target = self.call("Target.createTarget", {"url": "about:blank"})["targetId"]
        session = self.call("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        page = Page(self, session)
        page.call("Page.enable")
        return page

    def call(self, method: str, params: Mapping[str, Any], session: str | None = None) -> Any:
        """Call a method of the protocol.

        Raises:
            RuntimeError: the browser reported an error, or ended.
        """
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": dict(params)}
        if session is not None:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") != number:
                continue
            if "error" in answer:
                raise RuntimeError(f"{method}: {answer['error']}")
            return answer["result"]

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            if not select.select([self._in], [], [], 120)[0]:
                raise RuntimeError("the browser did not answer for 120 s")
            part = os.read(self._in, 1 << 20)
            if not part:
                raise RuntimeError(f"the browser ended with {self.process.poll()}")
            self._buffer += part
        line, self._buffer = self._buffer.split(b"\0", 1)
        found: dict[str, Any] = json.loads(line)
        return found

"""A headless Chromium, driven over two pipes with the DevTools protocol: no port, no further package.

`Browser` starts one process; `Browser.page()` opens a page of its own in it. Tests and scripts/make_pictures.py use it.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Tuple

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage", "--hide-scrollbars"),
    "--disable-features=SpareRendererForSitePerProcess",
    *("--no-proxy-server", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", "--remote-debugging-pipe"),
)
START_S, CALL_S = 90.0, 60.0
Message = Dict[str, Any]


def find_chromium() -> Optional[str]:
    """Return the path of a Chromium; None if none is installed."""
    return next((path for path in map(shutil.which, _NAMES) if path), None)


class Browser:
    """One Chromium process; leaving the context ends it and removes its profile."""

    def __init__(self, path: str) -> None:
        self._profile = tempfile.mkdtemp(prefix="raypod-browser-")
        self._number, self._buffer = 0, b""
        self._answers: Dict[int, Message] = {}
        self.events: List[Message] = []
        read_commands, self._write = os.pipe()
        self._read, write_answers = os.pipe()
        # Chromium reads commands from descriptor 3 and writes answers to 4.
        wrapper = f'exec "$0" "$@" 3<&{read_commands} 4>&{write_answers}'
        command = ["bash", "-c", wrapper, path, *_FLAGS, f"--user-data-dir={self._profile}", "about:blank"]
        descriptors, null = (read_commands, write_answers), subprocess.DEVNULL
        self._process = subprocess.Popen(
            command, pass_fds=descriptors, stdin=null, stdout=null, stderr=null, start_new_session=True
        )
        for descriptor in descriptors:
            os.close(descriptor)

    def __enter__(self) -> Browser:
        try:
            self.call("Browser.getVersion", timeout_s=START_S)
            with self.page() as page:  # the first page starts processes that serve all pages
                page.run("1")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """End the process and its children."""
        with contextlib.suppress(OSError, TimeoutError):
            self.call("Browser.close", timeout_s=5.0)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5.0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # its session: also the children
        self._process.wait()
        os.close(self._write)
        os.close(self._read)
        for _ in range(50):  # a child that is being killed may still write into the profile
            shutil.rmtree(self._profile, ignore_errors=True)
            if not os.path.exists(self._profile):  # noqa: PTH110
                return
            time.sleep(0.1)

    def call(self, method: str, session: Optional[str] = None, timeout_s: float = CALL_S, **params: Any) -> Message:
        """Send a command and return its result. TimeoutError without an answer, OSError if the browser has ended."""
        self._number += 1
        number, deadline = self._number, time.monotonic() + timeout_s
        of_session = {} if session is None else {"sessionId": session}
        message: Message = {"id": number, "method": method, "params": params, **of_session}
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while number not in self._answers:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{method}: no answer within {timeout_s:g} s")
            self.receive(deadline - time.monotonic())
        answer = self._answers.pop(number)
        assert "error" not in answer, f"{method}: {answer['error']}"
        result: Message = answer["result"]
        return result

    def receive(self, wait_s: float) -> None:
        """Read the messages that arrive within a time; events are appended to `events`."""
        if not select.select([self._read], [], [], max(0.0, wait_s))[0]:
            return
        data = os.read(self._read, 1 << 20)
        if not data:
            raise OSError("the browser has ended")
        *messages, self._buffer = (self._buffer + data).split(b"\0")
        for message in map(json.loads, messages):
            if "id" in message:
                self._answers[message["id"]] = message
            else:
                self.events.append(message)

    @contextlib.contextmanager
    def page(self, width: int = 1280, height: int = 900, dark: bool = False) -> Iterator[Page]:
        """Open a page in a profile of its own, with the size of its window in CSS pixels and the colour scheme."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        page = Page(self, self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"])
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        page.resize(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        page.call("Emulation.setEmulatedMedia", features=[scheme])
        try:
            yield page
        finally:
            self.call("Target.disposeBrowserContext", browserContextId=context)


class Page:
    """A page. `errors` holds what it wrote to the console as an error, and its uncaught exceptions."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session

    def call(self, method: str, **params: Any) -> Message:
        """Send a command to the page; see `Browser.call`."""
        return self._browser.call(method, self._session, **params)

    def resize(self, width: int, height: int) -> None:
        """Set the size of the window in CSS pixels."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 700}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def open(self, url: str) -> None:
        """Load a page and wait until it is loaded."""
        self._browser.events[:] = [each for each in self._browser.events if each.get("sessionId") != self._session]
        assert "errorText" not in self.call("Page.navigate", url=url)
        deadline = time.monotonic() + CALL_S
        while not self._events("Page.loadEventFired"):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{url} is not loaded within {CALL_S:g} s")
            self._browser.receive(1.0)

    def run(self, script: str) -> Any:
        """Return the value of a JavaScript expression; a promise is awaited."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait_for(self, script: str, timeout_s: float = 30.0) -> Any:
        """Wait until an expression is true; return its value."""
        deadline = time.monotonic() + timeout_s
        while not (value := self.run(script)):
            assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {script}"
            self._browser.receive(0.1)
        return value

    def picture(self, path: Path, clip: Optional[Tuple[float, float, float, float]] = None) -> None:
        """Write a PNG of the page, or of the rectangle `clip`: (x, y, width, height) in CSS pixels."""
        size = "[0, 0, document.documentElement.clientWidth, document.documentElement.scrollHeight]"
        area = {**dict(zip(("x", "y", "width", "height"), clip or self.run(size))), "scale": 1}
        data = self.call("Page.captureScreenshot", format="png", clip=area, captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))

    def pdf(self) -> bytes:
        """Return the page as it is printed."""
        return base64.b64decode(self.call("Page.printToPDF", printBackground=True, preferCSSPageSize=True)["data"])

    @property
    def errors(self) -> List[str]:
        """Errors in the console and uncaught exceptions."""
        thrown = [params["exceptionDetails"] for params in self._events("Runtime.exceptionThrown")]
        found = [str(each.get("exception", each)) for each in thrown]
        for params in self._events("Runtime.consoleAPICalled"):
            if params["type"] in ("error", "warning", "assert"):
                found.append(str([each.get("value", each.get("description")) for each in params["args"]]))
        entries = [params["entry"] for params in self._events("Log.entryAdded")]
        return found + [str(entry["text"]) for entry in entries if entry["level"] in ("error", "warning")]

    @property
    def requests(self) -> List[str]:
        """The addresses that the page has requested."""
        return [params["request"]["url"] for params in self._events("Network.requestWillBeSent")]

    def _events(self, method: str) -> List[Message]:
        """Return the parameters of the events of a kind since the page was opened."""
        of_page = [each for each in self._browser.events if each.get("sessionId") == self._session]
        return [each["params"] for each in of_page if each["method"] == method]

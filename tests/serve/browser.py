"""A headless Chromium, controlled through its DevTools protocol, for tests of web pages."""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

PATIENCE_S = 60.0  # for what must happen; only a failing test waits that long
_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def find_browser() -> str | None:
    """The browser's program; None if there is none."""
    return next(filter(None, map(shutil.which, _NAMES)), None)


class NavigatedError(Exception):
    """The page was left while a command ran."""


class Page:
    """A page in a tab of its own.

    Attributes:
        problems: exceptions of its scripts, errors on its console, and refusals of the browser.
    """

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._numbers = itertools.count(1)
        self.problems: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.command(f"{domain}.enable")

    def command(self, method: str, **params: Any) -> Any:
        """Give a command of the protocol; its result.

        Raises:
            NavigatedError: the page was left meanwhile.
        """
        number = next(self._numbers)
        self._connection.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            message = json.loads(self._connection.recv(PATIENCE_S))
            if message.get("id") == number:
                error = message.get("error")
                if error is not None and "navigated" in error["message"]:
                    raise NavigatedError(error["message"])
                assert error is None, (method, error)
                return message["result"]
            self._note(message)

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.problems.append(json.dumps(params["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.problems.append(json.dumps(params["args"]))
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                entry = params["entry"]
                self.problems.append(f"{entry['text']} {entry.get('url', '')}")

    def open(self, url: str) -> None:
        """Go to an address."""
        assert "errorText" not in self.command("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete'")

    def evaluate(self, expression: str) -> Any:
        """The value of an expression of JavaScript, which JSON can express."""
        result = self.command(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait_for(self, expression: str) -> None:
        """Wait until an expression is true, also of a page that another one takes the place of."""
        deadline_s = time.monotonic() + PATIENCE_S
        while True:
            with suppress(NavigatedError):
                if self.evaluate(expression):
                    return
            assert time.monotonic() < deadline_s, f"{expression} stayed false; {self.problems}"
            time.sleep(0.05)

    def text(self, selector: str) -> str:
        """Text of the first element that a selector finds."""
        return str(self.evaluate(f"document.querySelector({json.dumps(selector)}).textContent"))

    def click(self, selector: str) -> None:
        """Click the first element that a selector finds, as a user would."""
        self.evaluate(f"document.querySelector({json.dumps(selector)}).scrollIntoView()")
        box = self.evaluate(
            f"JSON.parse(JSON.stringify(document.querySelector({json.dumps(selector)})"
            ".getBoundingClientRect()))"
        )
        at = {"x": box["x"] + box["width"] / 2, "y": box["y"] + box["height"] / 2}
        for kind in ("mousePressed", "mouseReleased"):
            self.command("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **at)

    def type(self, text: str) -> None:
        """Type into the element that has the focus."""
        self.command("Input.insertText", text=text)

    def show_as(self, scheme: str, width: int, height: int) -> None:
        """Use a colour scheme, "light" or "dark", and a size of the window in pixels."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.command("Emulation.setEmulatedMedia", features=features)
        self.command("Emulation.setScrollbarsHidden", hidden=True)
        self.command(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def screenshot(self, file: Path) -> None:
        """Write the whole page as a PNG."""
        result = self.command("Page.captureScreenshot", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(result["data"]))


class Browser:
    """A running browser.

    Args:
        address: of its DevTools, as host and port.
    """

    def __init__(self, address: str, control: ClientConnection) -> None:
        self._address = address
        self._control = control
        self._numbers = itertools.count(1)

    @contextmanager
    def page(self) -> Iterator[Page]:
        """A new page with a session of its own; it is closed at the end."""
        context = self._command("Target.createBrowserContext")["browserContextId"]
        target = self._command("Target.createTarget", url="about:blank", browserContextId=context)[
            "targetId"
        ]
        with connect(f"ws://{self._address}/devtools/page/{target}", max_size=None) as connection:
            yield Page(connection)
        self._command("Target.disposeBrowserContext", browserContextId=context)

    def _command(self, method: str, **params: Any) -> Any:
        number = next(self._numbers)
        self._control.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            message = json.loads(self._control.recv(PATIENCE_S))
            if message.get("id") == number:
                assert "error" not in message, (method, message["error"])
                return message["result"]


@contextmanager
def running_browser(program: str) -> Iterator[Browser]:
    """Start a browser, and stop it at the end."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        options = [
            "--headless=new",
            "--remote-debugging-port=0",
            f"--user-data-dir={folder}",
            "--no-first-run",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--disable-background-networking",
            *(["--no-sandbox"] if os.geteuid() == 0 else []),  # it refuses to run for root
        ]
        process = subprocess.Popen(
            [program, *options, "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            port, path = _devtools(Path(folder) / "DevToolsActivePort", process)
            with connect(f"ws://127.0.0.1:{port}{path}", max_size=None) as control:
                yield Browser(f"127.0.0.1:{port}", control)
        finally:
            process.terminate()
            process.wait(PATIENCE_S)


def _devtools(file: Path, process: subprocess.Popen[bytes]) -> tuple[str, str]:
    """Port and path of the browser's DevTools, which it writes to a file when it listens."""
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        assert process.poll() is None, f"the browser has ended with {process.returncode}"
        lines = file.read_text().splitlines() if file.exists() else []
        if len(lines) == 2:
            return lines[0], lines[1]
        assert time.monotonic() < deadline_s, "the browser did not start"
        time.sleep(0.05)

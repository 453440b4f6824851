"""A headless Chromium that tests talk to over two pipes, by its DevTools protocol."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PATIENCE = 60.0  # seconds for any one answer


def find() -> str | None:
    """Return where a Chromium is, if there is one."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


# It is Chromium that reads from 3 and writes to 4.
_LAUNCH = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); "
    "os.execv(sys.argv[3], sys.argv[3:])"
)


class Browser:
    """One browser with one page, off line. Everything the page says or asks for is kept.

    Attributes:
        said: messages of the console, and errors.
        asked: addresses that the page asked for.
    """

    def __init__(self, program: str, profile: Path) -> None:
        low_read, self._to = os.pipe()
        self._from, low_write = os.pipe()
        to_read, to_write = (fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (low_read, low_write))
        flags = [
            "--headless", "--remote-debugging-pipe", "--disable-gpu", "--no-first-run",
            "--disable-dev-shm-usage", "--disable-background-networking", "--disable-extensions",
            "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={profile}",
        ]  # fmt: skip
        if os.geteuid() == 0:
            flags.append("--no-sandbox")
        launch = [sys.executable, "-c", _LAUNCH, str(to_read), str(to_write)]
        self._process = subprocess.Popen(
            [*launch, program, *flags, "about:blank"],
            pass_fds=(to_read, to_write), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        for fd in (low_read, low_write, to_read, to_write):
            os.close(fd)
        self._buffer, self._number, self._session = b"", 0, ""
        self._events: list[str] = []
        self.said: list[str] = []
        self.asked: list[str] = []
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(target for target in targets if target["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network", "Accessibility"):
            self.call(f"{domain}.enable")
        self.call(
            "Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=0,
            uploadThroughput=0,
        )  # fmt: skip

    def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        """Call a method and return its answer."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": arguments}
        if self._session:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._to, data) :]
        until = time.monotonic() + PATIENCE
        while True:
            answer = self._next(until)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return dict(answer["result"])
            self._heard(answer)

    def open(self, path: Path) -> None:
        """Open a file from disk and wait until it is loaded."""
        self.said.clear()
        self.asked.clear()
        self._events.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        until = time.monotonic() + PATIENCE
        while "Page.loadEventFired" not in self._events:
            self._heard(self._next(until))
        self.evaluate("new Promise(done => setTimeout(done, 100))")

    def evaluate(self, code: str) -> Any:
        """Return the value of an expression in the page."""
        answer = self.call(
            "Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def press(self, key: str) -> None:
        """Press a key: "Tab" or "Enter"."""
        code, text = {"Tab": (9, ""), "Enter": (13, "\r")}[key]
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, text=text,
                windowsVirtualKeyCode=code,
            )  # fmt: skip

    def close(self) -> None:
        """End the browser."""
        with contextlib.suppress(OSError, RuntimeError, TimeoutError):
            self._session = ""
            self.call("Browser.close")
        os.close(self._to)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        os.close(self._from)

    def _next(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._from], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                raise TimeoutError("Chromium did not answer")
            data = os.read(self._from, 1 << 20)
            if not data:
                raise RuntimeError("Chromium has gone")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(line))

    def _heard(self, event: dict[str, Any]) -> None:
        method, found = event.get("method", ""), event.get("params", {})
        self._events.append(method)
        if method == "Runtime.consoleAPICalled":
            self.said.append(f"{found['type']}: {[each.get('value') for each in found['args']]}")
        elif method == "Runtime.exceptionThrown":
            self.said.append(str(found["exceptionDetails"].get("text")))
        elif method == "Log.entryAdded":
            self.said.append(f"{found['entry']['level']}: {found['entry']['text']}")
        elif method == "Network.requestWillBeSent":
            self.asked.append(found["request"]["url"])

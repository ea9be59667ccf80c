"""A real headless Chromium for tests, controlled over a pipe by its DevTools protocol; needs no package."""

import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SWITCHES = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
    *("--hide-scrollbars", "--remote-debugging-pipe"),
)


class Chromium:
    """One browser with one page. `errors` collects what the console and the page's scripts report."""

    def __init__(self) -> None:
        assert PROGRAM
        self.profile = tempfile.mkdtemp(prefix="chromium-")
        there, self.commands = os.pipe()
        self.answers, back = os.pipe()
        # Chromium reads commands from descriptor 3 and answers on 4; a shell puts them there.
        line = f'exec "$@" 3<&{there} 4>&{back}'
        self.process = subprocess.Popen(
            ["bash", "-c", line, "bash", PROGRAM, *SWITCHES, f"--user-data-dir={self.profile}", "about:blank"],
            pass_fds=(there, back),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(there)
        os.close(back)
        self.buffer = b""
        self.number = 0
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.session = ""
        pages = [each for each in self.send("Target.getTargets")["targetInfos"] if each["type"] == "page"]
        attached = self.send("Target.attachToTarget", targetId=pages[0]["targetId"], flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> Any:
        """Send one command and return its result."""
        self.number += 1
        message: dict[str, Any] = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.commands, json.dumps(message).encode() + b"\0")
        wanted = self.number
        while True:
            answer = self._read()
            if answer.get("id") == wanted:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]
            self._heard(answer)

    def _read(self, seconds: float = 60) -> dict[str, Any]:
        until = time.monotonic() + seconds
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.answers], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                raise TimeoutError(f"Chromium answered nothing for {seconds} s")
            more = os.read(self.answers, 1 << 20)
            if not more:
                raise RuntimeError("Chromium has gone")
            self.buffer += more
        message, _, self.buffer = self.buffer.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer

    def _heard(self, event: dict[str, Any]) -> None:
        method, printed = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(printed["exceptionDetails"])[:500])
        elif method == "Runtime.consoleAPICalled" and printed["type"] in ("error", "warning", "assert"):
            self.errors.append(json.dumps(printed["args"])[:500])
        elif method == "Log.entryAdded" and printed["entry"]["level"] in ("error", "warning"):
            self.errors.append(printed["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(printed["request"]["url"])

    def size(self, width: int, height: int, *, phone: bool = False, dark: bool = False) -> None:
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", media="", features=[scheme])

    def open(self, page: Path) -> None:
        """Load a page and wait until its scripts have run and it is painted."""
        self.errors, self.requests = [], []
        self.send("Page.navigate", url=page.resolve().as_uri())
        self.run("new Promise(done => document.readyState === 'complete' ? done() : addEventListener('load', done))")
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def run(self, script: str) -> Any:
        """Return the value of a JavaScript expression, or of the promise that it returns."""
        result = self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in result:
            raise RuntimeError(json.dumps(result["exceptionDetails"])[:800])
        return result["result"].get("value")

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            text = {"text": "\r"} if (key, kind) == ("Enter", "keyDown") else {}
            self.send("Input.dispatchKeyEvent", type=kind, key=key, **text)

    def mouse(self, kind: str, x: float, y: float) -> None:
        self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(120)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self.commands)
        os.close(self.answers)
        shutil.rmtree(self.profile, ignore_errors=True)

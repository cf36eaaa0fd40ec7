"""A real headless Chromium, driven over its debugging pipe: no port, no extra package."""

import base64
import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-pipe"),
)
PATIENCE = 60.0  # seconds; CI machines are slow and shared


def find_chromium() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page. `errors` and `requests` fill with whatever the page logs and loads."""

    def __init__(self, program: str) -> None:
        self.profile = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        commands_out, self.commands = os.pipe()
        self.answers, answers_in = os.pipe()
        arguments = [program, *FLAGS, f"--user-data-dir={self.profile.name}", "about:blank"]
        # Chromium reads commands from descriptor 3 and writes answers to 4.
        shell = f'exec "$@" 3<&{commands_out} 4>&{answers_in}'
        self.process = subprocess.Popen(
            ["bash", "-c", shell, "bash", *arguments],
            pass_fds=(commands_out, answers_in),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands_out)
        os.close(answers_in)
        self.buffer, self.number, self.session = b"", 0, ""
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: object) -> None:
        self.session = ""
        with contextlib.suppress(OSError, EOFError):
            self.call("Browser.close")
        os.close(self.commands)
        os.close(self.answers)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self.profile.cleanup()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the DevTools protocol; events that arrive meanwhile are kept."""
        self.number += 1
        message: dict[str, Any] = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self.number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self.buffer:
            piece = os.read(self.answers, 1 << 16)
            if not piece:
                raise EOFError("Chromium has gone")
            self.buffer += piece
        message, _, self.buffer = self.buffer.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def open(self, path: Path, width: int = 1280, height: int = 800, phone: bool = False) -> None:
        self.visit(path.resolve().as_uri(), width, height, phone)

    def visit(self, url: str, width: int = 1280, height: int = 844, phone: bool = False) -> None:
        self.events.clear()
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if phone else 1,
            mobile=phone,
        )
        self.call("Page.navigate", url=url)
        self.until(f"document.readyState == 'complete' && location.href == {json.dumps(url)}")

    def until(self, condition: str) -> None:
        """Wait until a JavaScript expression is true in the page."""
        end = time.monotonic() + PATIENCE
        while not self.run(condition):
            if time.monotonic() > end:
                raise TimeoutError(f"never true: {condition}")
            time.sleep(0.05)

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression in the page."""
        answer = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{script}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def press(self, key: str, text: str = "") -> None:
        """A real key press, wherever the focus is."""
        for kind in ("keyDown", "keyUp"):
            sent = {"type": kind, "key": key, "code": key}
            codes = {"Enter": 13, "Tab": 9}
            if key in codes:
                sent |= {
                    "windowsVirtualKeyCode": codes[key],
                    "text": "\r" if key == "Enter" else "",
                }
            self.call("Input.dispatchKeyEvent", **sent)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    @property
    def errors(self) -> list[str]:
        """Everything on the console, uncaught or refused by the page's own policy."""
        self.run("1")
        wanted = ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled")
        return [json.dumps(e["params"]) for e in self.events if e.get("method") in wanted]

    @property
    def requests(self) -> list[str]:
        sent = [e for e in self.events if e.get("method") == "Network.requestWillBeSent"]
        return [e["params"]["request"]["url"] for e in sent]

    def pdf(self, path: Path) -> None:
        path.write_bytes(
            base64.b64decode(self.call("Page.printToPDF", printBackground=True)["data"])
        )

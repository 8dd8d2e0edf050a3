"""A headless Chromium, driven through its DevTools protocol over a pipe."""

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time

PROGRAMS = ("chromium-headless-shell", "chromium", "google-chrome")
SECONDS = 60
"""Time limit for a reply of the browser."""


def unavailable():
    """Returns why no browser can be started, or None."""
    found = any(shutil.which(name) for name in PROGRAMS)
    return None if found else f"none of {', '.join(PROGRAMS)} is installed"


class Browser:
    """One page. `problems` collects console errors, exceptions and requests to the network."""

    def __enter__(self):
        self._profile = tempfile.TemporaryDirectory(prefix="chromium-")
        program = next(path for name in PROGRAMS if (path := shutil.which(name)))
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()

        def pipes():  # the browser reads from descriptor 3 and writes to 4
            os.dup2(os.dup(to_browser), 3)
            os.dup2(os.dup(from_browser), 4)

        options = ("--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe")
        self._process = subprocess.Popen(
            [program, *options, f"--user-data-dir={self._profile.name}", "about:blank"],
            preexec_fn=pipes,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._buffer, self._number, self._session = b"", 0, None
        self.events, self.problems = [], []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *_):
        self._session = None
        try:
            self.call("Browser.close")  # also ends its child processes
            self._process.wait(timeout=SECONDS)
        finally:
            self._process.kill()
            self._process.wait()
        os.close(self._write)
        os.close(self._read)
        self._profile.cleanup()

    def _receive(self):
        deadline = time.monotonic() + SECONDS
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0, deadline - time.monotonic()))
            assert ready, "the browser did not reply"
            data = os.read(self._read, 1 << 20)
            assert data, "the browser exited"
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(message)
        if "method" in message:
            self.events.append(message["method"])
            self._record_problem(message["method"], message["params"])
        return message

    def _record_problem(self, method, params):
        if method == "Runtime.exceptionThrown":
            self.problems.append(params["exceptionDetails"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.problems.append(params["args"])
        elif method == "Log.entryAdded":
            self.problems.append(params["entry"])
        elif method == "Network.requestWillBeSent":
            url = params["request"]["url"]
            if not url.startswith(("file:", "data:")):
                self.problems.append(url)

    def call(self, method, **params):
        """Sends a DevTools command and returns its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._receive()).get("id") != self._number:
            pass
        assert "error" not in answer, answer
        return answer["result"]

    def open(self, file, *, width, scheme="light"):
        """Loads a page in a window of this width and color scheme. Waits until it is rendered."""
        phone = width < 600
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=phone,
        )
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])
        self.events.clear()
        self.call("Page.navigate", url=file.resolve().as_uri())
        while "Page.loadEventFired" not in self.events:
            self._receive()
        two_frames = "new Promise(r => requestAnimationFrame(() => requestAnimationFrame(r)))"
        self.evaluate(two_frames)

    def evaluate(self, expression):
        """Returns the value of a JavaScript expression."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def screenshot(self, file):
        """Writes a PNG image of the whole page."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(shot["data"]))

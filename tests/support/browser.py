"""A headless Chromium, driven over its pipe by the DevTools protocol."""

import base64
import contextlib
import json
import os
import shutil
import subprocess
import time

PROGRAM = shutil.which("chromium")  # Debian: chromium
OPTIONS = (
    "--headless=new --no-sandbox --disable-gpu --no-first-run --disable-background-networking --remote-debugging-pipe"
)


class Browser(contextlib.AbstractContextManager):
    """One page. `events` has all events so far: (method, parameters)."""

    def __init__(self, profile):
        (theirs, self._out), (self._in, out) = os.pipe(), os.pipe()
        for number in (theirs, out):
            os.set_inheritable(number, True)
        command = ["bash", "-c", f'exec "$@" 3<&{theirs} 4>&{out}', "-", PROGRAM, *OPTIONS.split()]
        command += [f"--user-data-dir={profile}", "about:blank"]
        self._process = subprocess.Popen(
            command, pass_fds=(theirs, out), stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        os.close(theirs)
        os.close(out)
        self._rest, self._number, self._session, self.events = b"", 0, {}, []
        (page,) = [one for one in self.call("Target.getTargets")["targetInfos"] if one["type"] == "page"]
        attached = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __exit__(self, *_):
        self._process.kill()
        self._process.communicate()
        os.close(self._in)
        os.close(self._out)

    def call(self, method, **params):
        """Returns the result of a command."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params} | self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            reply = self._next()
            if reply.get("id") == self._number:
                assert "result" in reply, reply
                return reply["result"]

    def open(self, url):
        """Opens a page; returns once it is loaded."""
        count = self.count("Page.loadEventFired")
        self.call("Page.navigate", url=url)
        while self.count("Page.loadEventFired") == count:
            self._next()

    def run(self, expression):
        """Returns the value of a JavaScript expression."""
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def wait(self, expression, seconds):
        """Returns once an expression is true."""
        deadline_s = time.monotonic() + seconds
        while not self.run(expression):
            assert time.monotonic() < deadline_s, expression
            time.sleep(0.2)

    def screenshot(self, path):
        """Writes a PNG of the visible part of the page."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def count(self, method):
        """The number of events of a kind so far."""
        return sum(name == method for name, _ in self.events)

    def _next(self):
        while b"\0" not in self._rest:
            more = os.read(self._in, 1 << 20)
            assert more, self._process.communicate()[1].decode()
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\0")
        message = json.loads(line)
        if "method" in message:
            self.events.append((message["method"], message["params"]))
        return message

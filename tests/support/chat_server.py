"""A chat server without a model: `serving(answer)` calls a function for each request of `POST /v1/chat/completions`.

    python -m tests.support.chat_server ADDRESS_FILE

answers reversed texts, most of them right, and writes its base URL to the file.
"""

import contextlib
import hashlib
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http import server


@contextlib.contextmanager
def serving(answer: Callable[[dict], dict | tuple[int, dict]]) -> Iterator[str]:
    """Yields the base URL of a server. `answer` returns a message, or (status, body) of an error."""

    class Handler(server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            found = answer(body | {"authorization": self.headers["authorization"]})
            status, reply = found if isinstance(found, tuple) else (200, _completion(body, found))
            text = json.dumps(reply).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format, *args):
            pass

    httpd = server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{httpd.server_port}/v1"
    finally:
        httpd.shutdown()
        httpd.server_close()


def _completion(body: dict, message: dict) -> dict:
    finish = "tool_calls" if message.get("tool_calls") else "stop"
    usage = {"prompt_tokens": 7, "completion_tokens": len((message.get("content") or "").split())}
    choice = {"index": 0, "message": {"role": "assistant"} | message, "finish_reason": finish}
    return {
        "object": "chat.completion",
        "model": body.get("model", "the only one"),
        "choices": [choice],
        "usage": usage,
    }


def reverser(body: dict) -> dict:
    """Answers a task of `reverse_text`, right with a probability that its text fixes. The seed decides."""
    text = body["messages"][-1]["content"].removeprefix("Reverse: ")
    draw = lambda name: int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") / 2**32  # noqa: E731
    is_right = draw(f"{text}/{body['seed']}") < draw(text)
    return {"content": text[::-1] if is_right else text}


if __name__ == "__main__":
    with serving(reverser) as url:
        with open(sys.argv[1], "w") as file:
            file.write(url)
        time.sleep(600)

"""A chat with a policy in the terminal.

    python -m inference.chat --weights runs/quickstart              (the newest version of a run)
    python -m inference.chat --model path/to/a/hugging_face_folder
    python -m inference.chat --url http://host:8100                 (a running server)

1. With --weights or --model, a server is started as a child process on a free port, and ends with the chat.
2. Each line is sent with the conversation so far, and the reply is streamed. An empty line starts a new conversation, Ctrl-C
   ends a reply, Ctrl-D ends the chat.
"""

import contextlib
import json
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import httpx

from inference import client
from sharding.system import cli, secret_file

ROOT = pathlib.Path(__file__).resolve().parent.parent


def stream_reply(http: httpx.Client, messages: list[dict], options: dict) -> Iterator[dict]:
    """Yields the deltas (new pieces of the message) of a streamed chat reply. Raises ValueError with the server's error message."""
    body = {"messages": messages, "stream": True} | options
    with http.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            response.read()
            raise ValueError(client.error_message(response))
        for line in response.iter_lines():
            data = line.removeprefix("data: ")
            if not line.startswith("data: ") or data == "[DONE]":
                continue
            chunk = json.loads(data)
            if "error" in chunk:
                raise ValueError(chunk["error"]["message"])
            for choice in chunk["choices"]:
                yield choice["delta"]


def talk(http: httpx.Client, options: dict, system: str | None) -> None:
    """Reads user messages from the terminal and prints replies until the end of input. `system` is the system prompt or None."""
    opening = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    if sys.stdin.isatty():
        cli.note("an empty line starts a new conversation, Ctrl-C ends a reply, Ctrl-D ends the chat")
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            print()
            return
        if not line:
            messages = list(opening)
            print("(a new conversation)")
            continue
        messages.append({"role": "user", "content": line})
        reply = {"role": "assistant", "content": ""}
        try:
            for delta in stream_reply(http, messages, options):
                for name in ("reasoning_content", "content"):
                    if text := delta.get(name):
                        reply[name] = reply.get(name, "") + text
                        print(text, end="", flush=True)
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            messages.pop()
            continue
        except KeyboardInterrupt:  # ends this reply; its text so far stays in the conversation
            pass
        print()
        messages.append(reply)


@contextlib.contextmanager
def served(arguments: list[str]) -> Iterator[str]:
    """Starts an inference server with these command-line arguments and yields its URL. The server stops when the `with` block ends."""
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "address"
        command = [sys.executable, "-m", "inference.serve", *arguments, "--port", "0", "--address_file", str(file)]
        command += ["--control", f"{folder}/control.sock", "--exit_with_parent"]
        command += "--num_slots 2 --prefill_batch 1 --steps_per_call 4".split()
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, cwd=ROOT) as process:
            try:
                while not file.exists():
                    if process.poll() is not None:
                        raise ValueError("the server did not start; see its error message above")
                    time.sleep(0.05)
                yield file.read_text()
            finally:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.communicate(timeout=2)  # closes standard input, which stops the server
                process.kill()


def main(argv: list[str] | None = None) -> int:
    """Runs the chat command of the terminal. Returns the exit code."""
    parser = cli.Parser(prog="python -m inference.chat", description=__doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--weights", help="a run's working directory, or its weights' root; serves the newest version")
    source.add_argument("--model", help="a Hugging Face folder, a GGUF file, or a hub ID")
    source.add_argument("--url", help="URL of a running server")
    parser.add_argument("--system", help="system message of every conversation")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--max_tokens", type=int, default=512)
    helps = "JSON of variables for the chat template, as in chat_template_kwargs of a request"
    parser.add_argument("--chat_template_kwargs", type=cli.json_object, default={}, metavar="JSON", help=helps)
    parser.add_argument("--max_model_len", type=int, default=1024, help="maximum context length of a started server")
    parser.add_argument("--api_key_file", help="file with the API key of --url's server (default: $INTELLAX_API_KEY)")
    parser.add_argument("--api_key", help="the key itself, which every user of this machine can then read (ps)")
    return cli.run(parser, argv, _chat)


def _chat(args) -> int:
    options = {"temperature": args.temperature, "max_tokens": args.max_tokens}
    options |= {"chat_template_kwargs": args.chat_template_kwargs} if args.chat_template_kwargs else {}
    url, key = args.url, secret_file.choose(args.api_key, args.api_key_file, "INTELLAX_API_KEY")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        with contextlib.ExitStack() as stack:
            if url is None:
                kind, folder = ("weights", args.weights) if args.weights else ("model", args.model)
                if pathlib.Path(folder).exists():  # not a URL or a hub ID; the server has another working directory
                    folder = str(pathlib.Path(folder).resolve())
                elif args.weights and "://" not in folder:  # a server would wait for it to appear
                    raise ValueError(f"{folder} does not exist; give the --workdir of a run")
                url = stack.enter_context(served([f"--{kind}", folder, "--max_model_len", str(args.max_model_len)]))
            timeout = httpx.Timeout(600, connect=10)
            http = stack.enter_context(httpx.Client(base_url=url, headers=headers, timeout=timeout))
            if args.url:
                http.get("/health")  # a wrong URL is reported before the first message
            talk(http, options, args.system)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        remedy = "start a server there, or correct --url" if args.url else "its server ended; start the command again"
        raise ValueError(f"no reply from {url}: {error}; {remedy}") from error
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Adapter of verifiers' second API: a package with a `Taskset`, of verifiers 0.3 and 0.4. Imports nothing of ours.

Options are fields of verifiers' `EnvConfig`, such as {"taskset": {"dataset_name": ...}, "agent": {"harness": {"id": ...}}}. An agent without
a harness of its own gets a chat loop in this process, with the tools of the task. The framework's default would run commands of the
model on this machine. One more option, `trained_agent`, names the only agent of several whose calls are trained.

The framework starts an interpreter for each tool server of an episode, which imports the framework again (4 s of CPU time). Here it is a fork.
"""

import asyncio
import collections
import contextlib
import dataclasses
import gc
import itertools
import json
import os
import pkgutil
import runpy
import signal
import socket
import sys
import traceback
import types

HARNESS = "intellax_chat"
FRAMEWORK = "verifiers.v1"
ENDLESS = 2**14  # tasks of a taskset without end: all are in memory
POLL_S, READY_S = 0.01, 5.0


def load(target, options):
    """Returns (config of the environment, name of the trained agent or "")."""
    options = dict(options)
    trained, loaders = options.pop("trained_agent", ""), _find("utils.loaders")
    sys.modules[HARNESS] = _harness_module()
    raw = {**options, "taskset": {**options.get("taskset", {}), "id": target}}
    config = loaders.resolve_env_config(raw)
    _fork_servers()
    _seed_runs()
    agents = {name: value for name, value in config if isinstance(value, _find("configs.agent").AgentConfig)}
    if trained and trained not in agents:
        raise ValueError(f"trained_agent = {trained!r} is not an agent of {target}; choose one of {', '.join(agents)}")
    for name, agent in agents.items():
        change = {}
        has_own = loaders.default_harness_id(target) == target
        if "harness" not in options.get(name, {}) and (not has_own if agent.harness is None else _is_chat(agent)):
            change["harness"] = loaders.harness_config_type(HARNESS)(id=HARNESS)
        if "runtime" not in options.get(name, {}):
            change["runtime"] = _find("runtimes").SubprocessConfig()
        if trained and name != trained:
            change["model"] = name  # the endpoint trains the model "policy" alone
        setattr(config, name, agent.model_copy(update=change))
    return config, trained


def tasks(env):
    """Yields (text, task) of the taskset."""
    taskset = _find("utils.loaders").load_taskset(env[0].taskset)
    for task in itertools.islice(taskset, ENDLESS if taskset.INFINITE else None):
        data = task.data.model_dump(mode="json")
        prompt = data.get("prompt")  # without one, agents make their own from the data
        yield json.dumps(prompt if prompt is not None else data, sort_keys=True), task


def run(env, task, base_url):
    """Plays one episode. Its reward is the mean over the agents that are trained."""
    config, trained = env
    os.environ.update(PRIME_INFERENCE_URL=base_url, PRIME_API_KEY="intellax")  # of judges
    for made in (config, getattr(task, "config", ())):
        _point_judges(made, base_url)
    episode = asyncio.run(_play(config, task, base_url))
    traces = [one for one in episode.traces if getattr(one.agent, "trainable", True)]
    traces = [one for one in traces if not trained or one.agent.name == trained] or episode.traces
    metrics, several = {}, len({one.agent.name for one in episode.traces}) > 1
    for trace in episode.traces:
        named = {name: reward.value for name, reward in trace.rewards.items() if reward is not None} | trace.metrics
        prefix = f"{trace.agent.name}/" if several else ""
        metrics |= {prefix + name: value for name, value in named.items() if value is not None}
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    return {
        "reward": sum(trace.reward for trace in traces) / max(len(traces), 1),
        "metrics": metrics,
        "stop": traces[0].stop_condition if traces else None,
        "error": f"{errors[0].type}: {errors[0].message}"[:500] if errors else None,
    }


def _point_judges(config, base_url):
    """Gives judges whose configs were made before the episode, with the framework's own endpoint, that of the episode."""
    client, model = _find("configs.client"), pkgutil.resolve_name("pydantic:BaseModel")
    for _, value in config:
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, client.BaseClientConfig) and one.base_url == client.DEFAULT_PRIME_INFERENCE_URL:
                one.__dict__["base_url"] = base_url
            elif isinstance(one, model):
                _point_judges(one, base_url)


async def _play(config, task, base_url):
    env, types_lib = _find("utils.loaders").load_environment(config), _find("types")
    client = _find("configs.client").EvalClientConfig(base_url=base_url, api_key_var="OPENAI_API_KEY")
    context = _find("clients").ModelContext("policy", client, types_lib.SamplingConfig())
    async with env.serving():
        return await env.run_slot(env.slots(task)[0], context)


def _fork_servers():
    """Lets the framework fork this process for a tool server, instead of starting `python -m MODULE`."""
    try:
        runtime, toolset = _find("runtimes.subprocess").SubprocessRuntime, _find("mcp.toolset").Toolset
        start = runtime.run_background
    except (ImportError, AttributeError):  # another release, which starts them in its own way
        return
    if not toolset.__subclasses__():
        return
    # each server would import one of the first two
    for name in ("mcp.server.fastmcp", "mcp.server.mcpserver", "uvicorn"):
        with contextlib.suppress(ImportError):
            pkgutil.resolve_name(f"{name}:")

    async def run_background(self, argv, env, log):
        if argv[:2] != [sys.executable, "-m"] or len(argv) != 3:
            return await start(self, argv, env, log)
        # As in the framework's: without the keys of this process.
        kept = {name: text for name, text in os.environ.items() if "API_KEY" not in name.upper()}
        gc.freeze()
        if not (pid := os.fork()):
            _run_server(argv[2], {**kept, **getattr(self, "process_env", dict)(env)}, self.workdir, log)
        with contextlib.suppress(OSError):  # it has done so itself
            os.setpgid(pid, pid)
        server = _Server(pid)
        self._background.append(server)
        for _ in range(round(READY_S / POLL_S)):  # then the framework polls once a second
            if server.returncode is not None or _listens(env.get("MCP_PORT_FILE")):
                break
            await asyncio.sleep(POLL_S)

    runtime.run_background = run_background


def _seed_runs():
    """Gives an agent that an episode lets do one task several times a seed for each: equal requests would get equal replies.

    So solvers of one problem, or the best of several attempts, differ. The first run keeps the episode's own seed.
    """
    agent, counts = _find("agent").Agent, collections.Counter()  # the process is a fork per episode
    if (parameters := getattr(agent, "_rollout_params", None)) is None:  # another release
        return

    def with_seed(self, task, *rest):
        found, key = parameters(self, task, *rest), (getattr(self, "_name", ""), task.data.model_dump_json())
        if counts[key]:
            context = found["ctx"]
            sampling = context.sampling.model_copy(update={"seed": counts[key]})
            found["ctx"] = dataclasses.replace(context, sampling=sampling)
        counts[key] += 1
        return found

    agent._rollout_params = with_seed


def _run_server(module, env, folder, log):
    """Runs a module as a program, in a fork, and ends this process."""
    status = 1
    try:
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        os.chdir(folder)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.closerange(3, 2**16)  # the pipe of the episode's reply, and sockets of its event loop
        os.environ.clear()
        os.environ.update(env)
        sys.argv = [module]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        status = 0
    except BaseException:  # foreign code may raise anything; the framework shows the end of the log
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


class _Server:
    """The process of a tool server, as far as the framework's runtime needs it."""

    def __init__(self, pid):
        self.pid, self._status = pid, None

    @property
    def returncode(self):
        if self._status is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self._status = os.waitstatus_to_exitcode(status) if ended else None
        return self._status

    async def wait(self):
        while self.returncode is None:
            await asyncio.sleep(POLL_S)
        return self.returncode


def _listens(file):
    """Returns True if a server accepts connections at the port in `file`, or if no file was asked for."""
    try:
        with socket.create_connection(("127.0.0.1", int(open(file).read()))):
            return True
    except (OSError, ValueError):
        return False
    except TypeError:
        return True


def _find(name):
    return pkgutil.resolve_name(f"{FRAMEWORK}.{name}:")


def _is_chat(agent):
    return agent.harness.id in ("null", "bash")


def _harness_module():
    """Returns a module with the chat loop, as the framework loads a harness by its name."""
    base, result = _find("harness"), _find("runtimes.base").ProgramResult
    httpx, to_wire = pkgutil.resolve_name("httpx:"), _find("dialects.chat").message_to_wire

    class Config(_find("configs.harness").HarnessConfig):
        pass

    class Chat(base.Harness[Config]):
        APPENDS_SYSTEM_PROMPT = SUPPORTS_MCP = SUPPORTS_RESUME = True
        EXECUTES_CODE = NEEDS_CONTAINER = False

        async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, **_):
            system, prompt = self.resolve_prompt(data)
            messages = [{"role": "system", "content": system}] if system else []
            more = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else map(to_wire, prompt or ())
            messages += more
            async with httpx.AsyncClient(timeout=None) as http:
                tools, places = await _list_tools(http, mcp_urls)
                while True:
                    body = {"model": ctx.model, "messages": messages} | ({"tools": tools} if tools else {})
                    headers = {"authorization": f"Bearer {secret}"}
                    reply = await http.post(f"{endpoint}/chat/completions", json=body, headers=headers)
                    if reply.status_code != 200:  # a spent budget ends the episode, which is scored
                        return result(int("maximum context length" not in reply.text), "", reply.text)
                    message = reply.json()["choices"][0]["message"]
                    messages.append({name: value for name, value in message.items() if value is not None})
                    if not message.get("tool_calls"):
                        return result(0, "", "")
                    for call in message["tool_calls"]:
                        text = await _call_tool(http, places, call["function"])
                        messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})

    module = types.ModuleType(HARNESS)
    vars(module).update(Chat=Chat, __all__=["Chat"])
    return module


_NUMBERS = itertools.count()


async def _rpc(http, url, method, params):
    """Calls a method of a stateless MCP server and returns its result."""
    body = {"jsonrpc": "2.0", "id": next(_NUMBERS), "method": method, "params": params}
    headers = {"accept": "application/json, text/event-stream", "mcp-protocol-version": "2025-06-18"}
    reply = (await http.post(url, json=body, headers=headers)).json()
    if "error" in reply:
        raise RuntimeError(f"tool server: {reply['error'].get('message')}")
    return reply["result"]


async def _list_tools(http, mcp_urls):
    tools, places = [], {}
    for server, url in mcp_urls.items():
        for tool in (await _rpc(http, url, "tools/list", {}))["tools"]:
            name = f"{server}_{tool['name']}" if server else tool["name"]
            places[name] = url, tool["name"]
            function = {"name": name, "description": tool.get("description") or "", "parameters": tool["inputSchema"]}
            tools.append({"type": "function", "function": function})
    return tools, places


async def _call_tool(http, places, function):
    """Returns the text of a tool's result, or of the error in the model's call."""
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError as error:
        return f"error: invalid JSON in tool arguments ({error}); resend the call with valid JSON"
    if not isinstance(arguments, dict):
        return f"error: tool arguments must be a JSON object, got {type(arguments).__name__}; resend as an object"
    if function["name"] not in places:
        return f"error: unknown tool {function['name']!r}"
    url, name = places[function["name"]]
    found = await _rpc(http, url, "tools/call", {"name": name, "arguments": arguments})
    return "\n".join(block.get("text", json.dumps(block)) for block in found["content"])

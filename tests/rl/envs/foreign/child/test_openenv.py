"""Episodes of OpenEnv's environments whose actions are calls of tools, with the model and the framework replaced."""

import dataclasses
import json
import types

from rl.envs.foreign.child import openenv


@dataclasses.dataclass
class CallToolAction:
    tool_name: str
    arguments: dict


class ListToolsAction:
    pass


class MCPEnvironment:
    def reset(self, seed=None):
        return {"done": False, "reward": 0.0, "metadata": {"message": f"ready {seed}"}}

    def step(self, action):
        if isinstance(action, ListToolsAction):
            return types.SimpleNamespace(tools=[{"name": "echo", "input_schema": {"type": "object"}}])
        if action.tool_name != "echo":
            return {"error": {"message": "unknown tool"}}
        content = [{"text": action.arguments["text"]}]
        return {"reward": 1.0, "done": action.arguments["text"] == "end", "result": {"content": content}}


class Echo(MCPEnvironment):
    pass


def calls(*pairs):
    made = [{"id": name, "function": {"name": name, "arguments": text}} for name, text in pairs]
    return {"role": "assistant", "content": "", "tool_calls": made}


def test_the_tools_of_an_environment_are_the_models(monkeypatch):
    end = calls(("echo", json.dumps({"text": "end"})))
    replies = [calls(("echo", json.dumps({"text": "a"})), ("other", "{}"), ("echo", "{")), end]
    asked = []
    monkeypatch.setattr(
        openenv, "_ask", lambda base_url, body: asked.append(json.loads(json.dumps(body))) or replies[len(asked) - 1]
    )
    env = openenv.load(f"{__name__}:Echo", {"reward": "sum", "system": "s"})
    found = openenv.run(env, 3, "")
    assert (found["reward"], found["metrics"], found["stop"]) == (2.0, {"steps": 3}, "done")
    assert asked[0]["tools"][0]["function"]["name"] == "echo"
    shown = [message["content"] for message in asked[1]["messages"]]
    assert shown[:5] == ["s", "ready 3", "", "a", "error: unknown tool"]
    assert "JSONDecodeError" in shown[5]
    replies[1:] = [{"role": "assistant", "content": "nothing more"}]
    asked.clear()
    assert openenv.run(env, 3, "")["stop"] == "no_call"

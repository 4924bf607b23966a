"""Changes that the adapter of verifiers' second API makes to the framework, which is replaced here."""

import dataclasses
import sys
import types

import pydantic
import pytest

from rl.envs.foreign.child import verifiers_v1


@dataclasses.dataclass(frozen=True)
class Context:
    sampling: object


class Sampling(dict):
    def model_copy(self, update):
        return Sampling(self | update)


class Agent:
    def __init__(self, name):
        self._name = name

    def _rollout_params(self, task, runtime, tools):
        return {"ctx": Context(Sampling(max_tokens=8))}


@pytest.fixture
def framework(monkeypatch):
    """Returns a function that puts a module in the place of one of the framework."""
    for name in ("verifiers", "verifiers.v1"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    return lambda name, **fields: monkeypatch.setitem(
        sys.modules, f"verifiers.v1.{name}", types.SimpleNamespace(**fields)
    )


def test_runs_of_one_agent_on_one_task_have_seeds_of_their_own(framework):
    """All solvers of a problem gave one answer, so that all comparisons among them were ties."""
    framework("agent", Agent=Agent)
    verifiers_v1._seed_runs()
    one, other = (types.SimpleNamespace(data=types.SimpleNamespace(model_dump_json=lambda x=x: x)) for x in "ab")
    runs = [("solver", one), ("solver", one), ("judge", one), ("solver", other), ("solver", one)]
    found = [Agent(name)._rollout_params(task, None, {})["ctx"].sampling for name, task in runs]
    assert [sampling.get("seed") for sampling in found] == [None, 1, None, None, 2]
    assert {sampling["max_tokens"] for sampling in found} == {8}


class Client(pydantic.BaseModel):
    base_url: str = "https://framework"


class Configs(pydantic.BaseModel):
    judge: Client = Client()
    judges: list[Client] = [Client(), Client(base_url="https://own")]
    inner: "Configs | None" = None


def test_judges_that_were_configured_at_import_ask_the_episodes_model(framework):
    framework("configs", __path__=[])
    framework("configs.client", BaseClientConfig=Client, DEFAULT_PRIME_INFERENCE_URL="https://framework")
    config = Configs(inner=Configs())
    verifiers_v1._point_judges(config, "http://episode")
    for one in (config, config.inner):
        assert [client.base_url for client in (one.judge, *one.judges)] == ["http://episode"] * 2 + ["https://own"]

"""Results of episodes of verifiers' first API, with the framework replaced."""

import sys
import types

import pytest

from rl.envs.foreign.child import verifiers_v0


@pytest.mark.parametrize(
    ("error", "is_models", "reported"),
    [
        (None, 0.0, None),
        ({"error": "EmptyModelResponseError", "error_chain_str": "..."}, 1.0, None),
        ({"error": "SandboxError"}, 0.0, "{'error': 'SandboxError'}"),
        (RuntimeError("of an older release"), 0.0, "of an older release"),
    ],
)
def test_a_malformed_reply_is_counted_apart_from_errors_of_the_environment(monkeypatch, error, is_models, reported):
    class Env:
        async def run_rollout(self, *arguments, **options):
            return {"reward": 0.5, "metrics": {"format": 0.25}, "stop_condition": "has_error", "error": error}

        def get_dataset(self):
            return [{"prompt": "p"}]

    monkeypatch.setitem(sys.modules, "verifiers", types.ModuleType("verifiers"))
    monkeypatch.setitem(sys.modules, "verifiers.types", types.SimpleNamespace(ClientConfig=lambda **fields: fields))
    found = verifiers_v0.run(Env(), 0, "http://127.0.0.1:1/v1")
    metrics = {"format": 0.25, "model_error": is_models}
    assert found == {"reward": 0.5, "metrics": metrics, "stop": "has_error", "error": reported}


def test_an_option_that_a_loader_may_ignore_is_noted(monkeypatch, capsys):
    """A run with `n_item=20` used the default of `n_items`, without a line about it."""

    def load_environment(*, n_items=50, **_):
        return types.SimpleNamespace()

    monkeypatch.setitem(sys.modules, "sprint", types.SimpleNamespace(load_environment=load_environment))
    framework = types.SimpleNamespace(load_environment=lambda target, **options: load_environment(**options))
    monkeypatch.setitem(sys.modules, "verifiers", framework)
    verifiers_v0.load("sprint", {"n_items": 20})
    assert not capsys.readouterr().err
    verifiers_v0.load("missing", {"n_item": 20})  # verifiers' own error, if it has one
    assert not capsys.readouterr().err
    verifiers_v0.load("owner/sprint", {"n_item": 20})
    assert (
        "owner/sprint: load_environment names no option n_item, and may ignore it; it names n_items\n"
        in capsys.readouterr().err
    )

"""The devices of learner and engine in a colocated run, by the configs that ask for it."""

import dataclasses

import jax
import pytest

from configs import quickstart
from rl.experiment import experiment, layout
from rl.swarm import rollout_system
from sharding.system.multihost import hosts


def resolved(**fields):
    config = quickstart.get_config()
    with config.unlocked():
        config.update_from_flattened_dict({name.replace("__", "."): value for name, value in fields.items()})
    return experiment.resolve(config)


@dataclasses.dataclass(frozen=True)
class Chip:
    id: int
    process_index: int


def test_each_host_gives_its_last_devices_to_its_engine():
    chips = [Chip(i, host) for i, host in enumerate((0, 0, 1, 1, 0, 0, 1, 1))]  # a torus does not number host by host
    learner, engines = layout.split(chips, 1)
    assert [chip.id for chip in learner] == [0, 1, 2, 3, 4, 6] and [chip.id for chip in engines] == [5, 7]
    assert layout.split(chips, 0) == (chips, chips)
    with pytest.raises(ValueError, match="rollout_devices = 4 leaves the learner none of a host's 4 devices; lower"):
        layout.split(chips, 4)
    with pytest.raises(ValueError, match="rollout_devices = 1 leaves the learner none of a host's 1 devices"):
        layout.split([*chips, Chip(8, 2)], 1)  # the smallest host decides


def test_the_meshes_of_both_layouts():
    """Eight devices (tests/conftest.py): all for both, or five and three apart."""
    shared = resolved(topology__mode="colocated", inference__mesh__tensor=2)
    learner, engine = layout.learner_mesh(shared.config), layout.engine_mesh(shared)
    assert learner.shape["fsdp"] == 8 and (engine.shape["data"], engine.shape["tensor"]) == (4, 2)
    assert {*learner.devices.flat} == {*engine.devices.flat} == {*jax.devices()}
    apart = resolved(topology__mode="colocated", mesh__rollout_devices=4)
    learner, engine = layout.learner_mesh(apart.config), layout.engine_mesh(apart)
    assert learner.shape["fsdp"] == engine.shape["data"] == 4
    assert [*learner.devices.flat, *engine.devices.flat] == jax.devices()
    with pytest.raises(ValueError, match="inference.mesh: inference.num_slots = 129 does not divide over the 4 batch"):
        layout.engine_mesh(resolved(mesh__rollout_devices=4, inference__num_slots=129))


@pytest.mark.parametrize(
    ("mode", "on_cpu", "on_chip"),
    [("auto", False, True), ("colocated", True, True), ("local", False, None), ("remote", False, False)],
)
def test_the_default_on_an_accelerator_is_one_process(monkeypatch, mode, on_cpu, on_chip):
    servers = {"topology__server_keys": ("ab" * 32,)} if mode == "remote" else {}
    exp = resolved(topology__mode=mode, **servers)
    assert layout.is_colocated(exp.config) == on_cpu
    rollout_system.check(exp)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    if on_chip is None:
        with pytest.raises(ValueError, match="'local' would start a second process on this host's tpus.* 'colocated'"):
            rollout_system.check(exp)
    else:
        assert layout.is_colocated(exp.config) == on_chip


def test_devices_of_an_engine_elsewhere_are_refused():
    with pytest.raises(ValueError, match="mesh.rollout_devices = 2, but topology.mode = 'local' .* 'colocated'"):
        resolved(topology__mode="local", mesh__rollout_devices=2)
    assert layout.is_colocated(resolved(mesh__rollout_devices=2).config)


def test_other_hosts_need_an_address_of_the_orchestrator(monkeypatch):
    exp = resolved(topology__mode="colocated")
    rollout_system.check(exp)
    monkeypatch.setattr(hosts.Hosts, "address", "10.0.0.2")
    with pytest.raises(
        ValueError, match="topology.host = '127.0.0.1' cannot be reached from the other 1 hosts; set it"
    ):
        rollout_system.check(exp, hosts.Hosts(0, 2))

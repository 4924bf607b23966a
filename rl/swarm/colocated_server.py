"""The inference server of a run as a thread of the learner's process, so that one process per host uses the accelerator.

1. `start` hands the learner's parameters to an engine (`mesh.hand_over`), compiles it, and serves the data routes of
   inference/serve.py.
2. `join` signs the server in at the orchestrator. Heartbeats name the policies to load, as for any server.
3. Before each train step the learner calls `release`: on devices that both use, the engine stops, and its cache leaves them.
   After it `hand_over` puts the new parameters on the engine's devices, and with `reclaim` the engine continues. It uses the new
   ones as soon as the orchestrator names their policy, in place of the published files. Until then it has both.

The first host of several has the orchestrator. Each has a server, which workers of all hosts use.
"""

import concurrent.futures
import contextlib
import dataclasses
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import jax

from inference import serve
from inference.engine import weights as weights_lib
from inference.rollouts import rollout as rollout_lib
from inference.scheduler import scheduler as scheduler_lib
from inference.server import inference_server, startup, web
from inference.swarm import membership
from models import config as config_lib
from models import lora, transformer
from models.kernels import cpu_transposed
from rl.experiment import command, layout
from rl.experiment import experiment as experiment_lib
from rl.protocol import timeline
from sharding.mesh import mesh as mesh_lib
from sharding.system import secret_file, sockets
from sharding.system.multihost import hosts as hosts_lib
from sharding.weights import broadcast
from sharding.weights.download import source as source_lib


@dataclasses.dataclass
class ColocatedServer:
    """The inference server in the learner's process, as the learner uses it. All hosts call its methods together."""

    url: str  # at which workers reach it
    hosts: hosts_lib.Hosts
    is_shared: bool  # True if the learner uses the engine's devices, too
    server: inference_server.InferenceServer
    targets: Any  # the shapes, dtypes, and shardings of the published parameters on the engine's devices
    orchestrator: str = ""  # its URL, from `join`

    def join(
        self, orchestrator: str, run: str, key_file: pathlib.Path, notify: Callable[[str], None]
    ) -> contextlib.AbstractContextManager:
        """Returns a context in which the server is a node of the run with public key `run`, and follows its policies."""
        self.orchestrator = orchestrator
        self.server.signer, self.server.run = rollout_lib.WorkerKey.load(key_file), run
        return membership.sign_in_server(orchestrator, self.server, self.url, notify)

    def release(self) -> None:
        """Makes room for a train step. On shared devices the engine stops, and running sequences wait in host memory."""
        if self.is_shared:
            self._await(self.server.scheduler.release)

    def hand_over(self, params: transformer.Params, policy: timeline.Policy) -> None:
        """Gives the engine the parameters of `policy`, to use when the orchestrator names it.

        Only the first host needs the policy's digest. Raises ValueError if a number is not finite.
        """
        digest, offer = self.hosts.broadcast(policy.digest), concurrent.futures.Future()
        self.server.offered = digest, offer  # before the first host can name the policy: it waits for all in `place`
        try:
            have = self.server.have
            base = have.params.get(lora.BASE) if have else None
            if any(leaf.is_deleted() for leaf in jax.tree.leaves(base)):  # by a rollback
                base = None
            placed = _placed(params, policy, digest, self.targets, base)
            # The check has collectives. In the thread of an update, next to a train step on the same devices, it could block both.
            shown = cpu_transposed.views(placed.params)
            checked = None if base is None else dataclasses.replace(placed, params=shown[lora.BASE])
            weights_lib.check_params(shown, self.server.store, checked)
        except BaseException as error:
            offer.set_exception(error)  # or an update would wait for it
            raise
        offer.set_result(placed)

    def reclaim(self) -> None:
        """Ends a `release`: the engine takes its memory back and continues. Call it once merged parameters are not needed any more."""
        if self.is_shared:
            self._await(self.server.scheduler.reclaim)

    def death(self) -> ValueError | None:
        """Blocks until the engine's thread has ended. Returns the error to end the run with, None if it was closed."""
        error = self.server.scheduler.join()
        if error is None:
            return None
        text = f"{type(error).__name__}: {error}".splitlines()[0]  # XLA appends a table of allocations
        remedy = "the same command resumes"
        if "RESOURCE_EXHAUSTED" in text:
            remedy = command.LESS_MEMORY
        return ValueError(f"the inference engine of this process ended: {text}; {remedy}")

    def _await(self, action: Callable[[], concurrent.futures.Future]) -> None:
        try:
            action().result()
        except (scheduler_lib.Closed, jax.errors.JaxRuntimeError) as error:
            raise self.death() or error from error


@contextlib.contextmanager
def start(
    experiment: experiment_lib.Experiment,
    weights: pathlib.Path,
    key: str | None,
    policy: timeline.Policy,
    params: transformer.Params,
    hosts: hosts_lib.Hosts = hosts_lib.ALONE,
) -> Iterator[ColocatedServer]:
    """Yields the server of this host, which serves `params` until the end of the block. Blocks until its engine is compiled.

    `params` are on the learner's mesh, and `policy` is published in the directory `weights`, signed by `key`.
    """
    mesh, metadata = layout.engine_mesh(experiment), experiment.published(params)[1]
    model, adapters = config_lib.ModelConfig(**metadata["model"]), lora.of_metadata(metadata)
    store = weights_lib.Store(model, mesh, lora=adapters)
    placed = _placed(params, policy, hosts.broadcast(policy.digest), store.abstract)
    del params
    with contextlib.ExitStack() as stack:
        source = source_lib.open(str(weights), trusted_key=key)
        parts = placed, source, experiment.engine, store, dataclasses.replace(experiment.tokenizer, date=None)
        server = startup.prepare_pulled(*parts, key=key).run()
        del placed, parts  # the server's, until it has newer ones
        stack.callback(server.close)
        sock = stack.enter_context(contextlib.closing(sockets.listen(hosts.address, 0)))
        api_key = secret_file.choose(None, None, "INTELLAX_API_KEY")  # which workers send to any server of the run
        stack.enter_context(web.in_thread(web.server(serve.make_app(server, api_key=api_key)), sock))
        is_shared = experiment.config.mesh.rollout_devices == 0
        yield ColocatedServer(sockets.address(sock), hosts, is_shared, server, store.abstract)


def _placed(params, policy: timeline.Policy, digest: str, targets, base=None) -> broadcast.Pulled:
    """Returns `params` on the engine's devices, as if pulled from the published version; `base`, if given, is on them already."""
    tree, base = lora.published(params), {} if base is None else {lora.BASE: base}
    own = {name: part for name, part in tree.items() if name not in base}
    placed = mesh_lib.hand_over(own, {name: targets[name] for name in own}) | base
    return broadcast.Pulled(policy.version, placed, {}, "", epoch=policy.epoch, sha256=digest)

"""A host of an inference server other than its first: it has no routes and no scheduler, and does as the first host does.

1. Engine calls are replayed in their order (inference/follower/replay.py). The host waits for them at a socket, not in a collective.
2. A fetch of other weights runs in a thread, while calls go on. Its end is reported to the first host, which then swaps, and
   the swap is one of the calls.
"""

import contextlib
import pathlib
import threading

from inference.engine import engine as engine_lib
from inference.engine import weights as weights_lib
from inference.follower import replay
from models import transformer
from sharding import broadcast
from sharding.download import source as source_lib
from sharding.multihost import hosts as hosts_lib


class Follower:
    """One such host, with its engine, and the fields of `InferenceServer` that concern weights."""

    def __init__(
        self,
        hosts: hosts_lib.Hosts,
        engine: engine_lib.Engine,
        params: transformer.Params,
        store: weights_lib.Store,
        weights: source_lib.Source | None,
        key: source_lib.Trusted,
        have: broadcast.Pulled | None,
    ):
        """`params` are the weights in use, and `have` is the version they are of."""
        self.hosts, self.store, self.weights, self.key, self.have = hosts, store, weights, key, have
        self._calls = replay.Replay(engine, params, self._swap)
        self._fetched: tuple[transformer.Params, broadcast.Pulled | None] | None = None

    def run(self) -> None:
        """Replays the calls of the first host, until that closes its server."""
        while (call := replay.receive(self.hosts))[0]["call"] != "close":
            if call[0]["call"] == "fetch":
                threading.Thread(target=self._answer_fetch, args=[call[0]], name="fetch", daemon=True).start()
            else:
                self._calls.run(*call)
        if self.weights is not None:
            self.weights.close()

    def _answer_fetch(self, asked: dict) -> None:
        problem = ""
        with contextlib.ExitStack() as stack:
            stack.push(self.hosts.report)
            try:
                self._fetch(**{name: value for name, value in asked.items() if name not in ("call", "kind")})
            except (ValueError, OSError) as error:
                problem = str(error)
            self.hosts.answer(problem)

    def _fetch(self, *, folder: str = "", source: str | None = None, version: int = 0, tree: str = "", **pins) -> None:
        """Fetches the weights of a Hugging Face folder, or of a broadcast (None: that of the start) whose digest is `tree`."""
        self._fetched = None
        if folder:
            params = weights_lib.load_folder(pathlib.Path(folder), self.store, on_host=True)
            weights_lib.check_params(params, self.store)
            self._fetched = params, None
            return
        root = self.weights if source is None else source
        assert root is not None
        broadcast.wait_for(root, version, timeout_s=weights_lib.RELAY_LAG_S, key=self.key, **pins)
        pulled = weights_lib.fetch(self.store, root, version, self.have, key=self.key, **pins)
        if pulled.digest != tree:
            raise OSError(f"version {version} is another here than on host 0; give both hosts one source")
        self._fetched = pulled.params, pulled

    def _swap(self, old: transformer.Params) -> transformer.Params:
        assert self._fetched is not None
        fetched, self._fetched = self._fetched, None
        params, self.have = weights_lib.put(self.store, *fetched, old, self.have)
        return params

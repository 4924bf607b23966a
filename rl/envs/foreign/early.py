"""Starts the process of a run's environment of another framework before the learner imports JAX, so that both load at the same time.

On two idle cores the imports of a learner take 4 s, and those of verifiers 4 to 7 s. `tryout.rehearse` takes the process. A run with
several environments begins none: a resumed one may have left out some.
"""

from rl.envs.catalog import catalog
from rl.envs.foreign import isolation
from rl.envs.foreign import process as process_lib
from rl.envs.packages import package as package_lib


def begin(config) -> process_lib.Beginning | None:
    """Returns the process that loads the environment of a run, which `tryout.rehearse` takes; the caller closes it.

    Returns None for an environment of this release or of the user, on a host with a `topology.process_id` above 0, and for an
    environment that cannot be found or isolated: the rehearsal reports it.
    """
    is_foreign = config.env.name.partition(":")[0] in package_lib.FRAMEWORKS
    if config.envs or not is_foreign or config.topology.process_id > 0:
        return None
    try:
        [entry] = catalog.located(config).values()
        foreign = catalog.load(entry.name, seed=config.seed, **entry.options).foreign
        assert foreign is not None
        is_isolated = isolation.is_possible(foreign.package, config.trust.sandbox, lambda line: None)
        return process_lib.Beginning(foreign, is_isolated=is_isolated)
    except (ValueError, OSError):
        return None

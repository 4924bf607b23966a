"""Whose fault a refused group is: its worker's, or that of the inference server that vouched for its samples.

1. A rollout may carry its server's signature (inference/rollouts/attestation.py). The check `checks.vouched` refuses one that does not fit.
2. A server that the run has registered is responsible for a group if it vouches for every sample, and if the reason is something that a
   server decides. Everything else is the worker's: prompt, reward, task, and samples of a server of its own.
3. So a worker that forges a sample cannot blame a server, since no signature fits; and it gains nothing by mixing servers in a group.
4. "statistics" never counts: it sums up earlier groups, of which a worker may have hidden the server, or chosen those that look bad.
5. Versions that the lease excludes are the worker's fault: a server signs those that it has, and its client refuses older ones. A server that
   invents versions, newer than any or in descending order, is at fault.
6. Kept sets that a worker did not ask for, or asked for without need, are its own fault: a signature does not cover this choice.
"""

from collections.abc import Collection, Sequence

from inference.rollouts import rollout as rollout_lib
from rl.verification import checks
from rl.verification import rules as rules_lib

SERVER_REASONS = "versions length tokens routing kept logprob termination toploc sampling shape".split()


def server_of(rollouts: Sequence[rollout_lib.Rollout], registered: Collection[str]) -> str:
    """Returns the one server of `registered` (public keys in hex) that all samples of a group name, or "". Checks no signature."""
    servers = {rollout.server for rollout in rollouts}
    server = servers.pop() if len(servers) == 1 else ""
    return server if server in registered else ""


def server_at_fault(
    rollouts: Sequence[rollout_lib.Rollout],
    verdict: checks.Verdict,
    rules: rules_lib.Rules,
    registered: Collection[str],
) -> str:
    """Returns the server that is at fault for a refused group of well-formed rollouts, or "" if its worker is. `rules` are of its lease."""
    if verdict.reason not in SERVER_REASONS or not (server := server_of(rollouts, registered)):
        return ""
    if verdict.reason == "versions" and any(checks.is_excluded(rollout, rules) for rollout in rollouts):
        return ""
    if verdict.reason == "kept" and any(bool(one.kept) != bool(checks.kept_width(one, rules)) for one in rollouts):
        return ""
    return server if all(checks.vouched(rollout, rules).accepted for rollout in rollouts) else ""

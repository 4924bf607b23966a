"""Describes every metric: those of metrics.jsonl by pattern, and those of each role's /metrics by name.

`python -m docs.pages` writes docs/metrics.md from it, and tests compare it with the metrics of a run and with scrapes of all roles.
"""

import fnmatch

# In metrics.jsonl, and as intellax_learner_metric{name=...}. `*` stands for any text; the first pattern that fits counts.
LINES = {
    "loss/total": "the loss that is minimized, per token",
    "loss/policy": "the policy loss alone",
    "loss/num_tokens": "trained tokens of the batch",
    "loss/skipped": "1 if a number of the update was not finite, so that the update was skipped",
    "loss/grad_norm": "norm of the gradient before clipping",
    "loss/entropy": "mean entropy of trained tokens, nats",
    "loss/clip_frac": "fraction of trained tokens without a gradient, by the loss",
    "loss/clip_frac_positive": "the same, of tokens with a positive advantage",
    "loss/clip_frac_negative": "the same, of tokens with a negative advantage",
    "loss/mismatch_kl": "KL of the policy that the ratios are taken against, from the trained one; k3 estimator",
    "loss/mismatch_kl_dropped": "the part of it in tokens without a gradient",
    "loss/mismatch_kl_mixed": "the part of it in tokens that read keys of other versions than their own",
    "loss/mismatch_kl_per_*": "its mean over one kind of tokens (rl/experiment/reporting/diagnostics.py)",
    "loss/mixed_frac": "fraction of tokens that read keys of other versions than their own",
    "loss/sampler_kl": "KL of the sampler from the learner, where loss/mismatch_kl is of the batch's own updates",
    "loss/ratio_mean": "mean importance ratio; 1 in expectation",
    "loss/ratio_sq_mean": "mean square of the importance ratio",
    "loss/effective_sample_frac": "(mean ratio)^2 / mean ratio^2; 1 on policy",
    "loss/kl": "divergence from objective.kl_reference",
    "loss/ref_kl": "KL to the teacher on sampled tokens",
    "loss/ce": "supervised cross entropy",
    "loss/router_balance": "loss that balances the experts",
    "loss/optimizer_steps": "optimizer steps of the batch",
    "loss/optimizer_steps_missing": "optimizer steps of objective.optimizer_steps that found no micro-batch",
    "loss/held_out": "warm-up: loss on held-out examples",
    "grad_norm/*": "norm of the gradient of a kind of module, before clipping",
    "moe/*": "load of the experts, and how far router replay differs from the learner's own choice",
    "optimizer/learning_rate": "the learning rate of the step",
    "rollout/reward": "mean reward of the batch",
    "rollout/reward_std": "standard deviation of the rewards of the batch",
    "rollout/response_length": "mean sampled tokens of an episode",
    "rollout/response_length_max": "most sampled tokens of an episode",
    "rollout/length_p*": "quantile of the sampled tokens of an episode",
    "rollout/length_of_best": "mean tokens of samples above their group's mean reward",
    "rollout/length_at_limit_frac": "fraction of samples as long as their limit",
    "rollout/truncated_frac": "fraction of samples that end at a length limit",
    "rollout/score_error_frac": "fraction of samples whose scorer failed",
    "rollout/num_tokens": "sampled tokens of the batch",
    "rollout/turns": "mean turns of an episode, where there are several",
    "rollout/zero_advantage_frac": "fraction of groups whose rewards are all equal: they teach nothing",
    "rollout/all_lowest_frac": "fraction of groups with the least reward throughout",
    "rollout/all_highest_frac": "fraction of groups with the greatest reward throughout",
    "env/scores/*": "mean of a part of the reward",
    "env/*": "the same as rollout/..., of one environment of several",
    "own/*": "your own metrics (rl.metrics)",
    "curriculum/*": "tasks by pool or level (rl.curriculum), by environment if there are several",
    "sync/lag": "mean lag of a sample's oldest token, in versions",
    "sync/lag_max": "greatest lag",
    "sync/lag_*": "fraction of samples with this lag; 8 counts all above it",
    "batch/num_row_tokens": "tokens that the learner computes: prompts once per group, and samples",
    "batch/sequence_length": "mean tokens of a rollout with its prompt",
    "batch/num_left_out": "rollouts that were left out, because their scorer failed (rl.score_errors, rl.min_group)",
    "batch/num_streams_left_out": "streams beyond the room of the batch",
    "batch/num_*": "groups or deliveries that no batch took, by reason",
    "batch/length_*": "mean length of rollouts in dropped groups, and in those that wait for later batches",
    "trust/num_*": "rollouts by outcome since the step before, also those of groups for later batches, so that accepted ones may be more than a batch has (docs/decisions/trust.md), and faults of validators",
    "held_out*": "score of an evaluation (phase evaluation...): avg_at_k, pass_at_k, and num_tasks",
    "time/wait_s": "seconds that the learner waits for the batch",
    "time/train_step_s": "seconds of the train step",
    "time/publish_s": "seconds until the new version is published",
    "time/checkpoint_s": "seconds that the checkpoint blocks",
    "time/eval_s": "seconds of an evaluation that the learner waits for",
    "time/step_s": "seconds of the whole step",
    "time/tokens_per_s": "sampled tokens of the batch per second of the step",
    "time/unix": "the end of the step, Unix seconds",
    "machine/mfu": "model FLOPs of the train step per peak FLOPs of its devices; left out where the peak is unknown",
    "machine/learner_busy_frac": "fraction of the step in which the learner does not wait",
    "machine/memory_peak_bytes": "most memory of the learner's process so far",
    "machine/device_memory_peak_bytes": "most memory of any of its devices so far, where JAX reports it",
    "machine/servers_*": "load of all healthy inference servers: requests, tokens per second, greatest fraction of a KV cache",
    "machine/num_*": "healthy nodes of a role",
}

_SECONDS = "histogram of seconds per"
# By role: names of /metrics.
SCRAPES = {
    "learner": {
        "intellax_learner_step": "the newest train step",
        "intellax_learner_metric": "the newest value of each metric of metrics.jsonl, by name",
        "intellax_learner_step_seconds": f"{_SECONDS} step",
        "intellax_learner_wait_seconds": f"{_SECONDS} wait for a batch",
        "intellax_learner_train_step_seconds": f"{_SECONDS} train step",
        "intellax_learner_publish_seconds": f"{_SECONDS} publication of a version",
        "intellax_learner_checkpoint_seconds": f"{_SECONDS} checkpoint, as far as it blocks",
        "intellax_learner_eval_seconds": f"{_SECONDS} evaluation, as far as it blocks",
    },
    "orchestrator": {
        "intellax_orchestrator_policy_version": "the version that servers have",
        "intellax_orchestrator_groups": "unfinished groups, by state",
        "intellax_orchestrator_rollouts_total": "rollouts by outcome",
        "intellax_orchestrator_drops_total": "groups that no batch took, by reason",
        "intellax_orchestrator_nodes": "nodes, by role and state",
        "intellax_orchestrator_environment_groups_total": "groups of batches, by environment",
        "intellax_orchestrator_environment_signal_total": "those with an advantage, by environment",
        "intellax_orchestrator_environment_rollouts_total": "rollouts of batches, by environment",
        "intellax_orchestrator_environment_errors_total": "rollouts whose reward has an error, by environment",
        "intellax_orchestrator_worker_verified_groups": "groups that passed a replay, by worker: of 32 at most",
        "intellax_orchestrator_worker_rejected_groups": "rejected groups, by worker: of 32 at most",
        "intellax_orchestrator_lease_seconds": f"{_SECONDS} lease, without its wait for work",
        "intellax_orchestrator_submit_seconds": f"{_SECONDS} submission, with its checks",
        "intellax_orchestrator_update_seconds": f"{_SECONDS} version, from its announcement until servers have it",
        "intellax_orchestrator_verdict_seconds": f"{_SECONDS} group, until it has its verdicts",
    },
    "server": {
        "vllm:num_requests_running": "requests with a sample in a slot",
        "vllm:num_requests_waiting": "requests without one",
        "vllm:num_requests_waiting_by_reason": "the same, by reason",
        "vllm:kv_cache_usage_perc": "fraction of the positions of the key-value cache in use, 0 to 1",
        "vllm:cache_config_info": "slots and their length, or pages and theirs, as labels",
        "vllm:num_preemptions_total": "sequences moved to host memory because no page was free (`inference.num_pages`)",
        "vllm:prefix_cache_queries_total": "prompt tokens",
        "vllm:prefix_cache_hits_total": "prompt tokens whose keys were cached",
        "vllm:prompt_tokens_total": "prompt tokens",
        "vllm:generation_tokens_total": "sampled tokens",
        "vllm:e2e_request_latency_seconds": f"{_SECONDS} request, with all its samples",
        "vllm:request_queue_time_seconds": f"{_SECONDS} request, until its first sample has a slot",
        "vllm:time_to_first_token_seconds": f"{_SECONDS} sample, from its request until its first token",
        "vllm:request_time_per_output_token_seconds": f"{_SECONDS} token of a sample, from its slot to its end",
        "intellax:policy_version": "the version that it serves",
        "intellax:policy_epoch": "the epoch of that version",
        "intellax:slots_running": "slots in use",
        "intellax:prefix_cache_bytes": "bytes of the prefix cache",
        "intellax:weight_updates_total": "versions loaded",
        "intellax:aborted_total": "samples of requests that were cancelled",
        "intellax:faults_total": "requests that the engine could not finish",
        "intellax:prefill_calls_total": "calls of the prefill program",
        "intellax:prefill_chunks_total": "chunks of long prompts",
        "intellax:prompt_tokens_total": "prompt tokens that were computed",
        "intellax:samples_total": "finished samples",
        "intellax:requests_total": "finished requests",
        "intellax:generate_calls_total": "calls of the decode program",
        "intellax:decode_steps_total": "decode steps",
        "intellax:decode_s_total": "seconds in decode calls",
        "intellax:update_seconds": f"{_SECONDS} update of the weights: wait, pull, check, and swap",
    },
    "worker": {
        "intellax_worker_groups": "groups that are running, and those that wait to be submitted",
        "intellax_worker_groups_total": "groups by fate",
        "intellax_worker_tokens_total": "sampled tokens",
        "intellax_worker_environment_rollouts_total": "rollouts of generated groups, by environment",
        "intellax_worker_environment_errors_total": "those whose reward has an error, by environment",
        "intellax_worker_environment_turns_total": "calls of the model in these rollouts, by environment",
        "intellax_worker_group_seconds": f"{_SECONDS} group, from its lease until its rewards",
        "intellax_worker_submit_seconds": f"{_SECONDS} submission",
    },
    "validator": {
        "intellax_validator_verdicts_total": "verdicts by result",
        "intellax_validator_verdict_seconds": f"{_SECONDS} request for verdicts",
    },
    "relay": {
        "intellax_relay_complete_versions": "versions that it has completely",
        "intellax_relay_newest_version": "the newest of them; -1: none",
        "intellax_relay_disk_bytes": "bytes of its mirror",
        "intellax_relay_connections": "open connections",
        "intellax_relay_upstream_alive": "1 if an upstream answers",
        "intellax_relay_served_total": "requests by status, bytes, and refusals",
        "intellax_relay_mirrored_total": "versions, objects, and bytes taken from upstream, and errors",
        "intellax_relay_upstream_success": "fraction of downloads that succeed, by upstream",
        "intellax_relay_upstream_bytes_per_s": "bytes per second, by upstream",
        "intellax_relay_upstream_failures": "failed downloads, by upstream",
        "intellax_relay_upstream_lies": "objects with a wrong digest, by upstream",
    },
}


def describe(name: str) -> str | None:
    """Returns the description of a metric of metrics.jsonl, or None if it has none."""
    return next((text for pattern, text in LINES.items() if fnmatch.fnmatchcase(name, pattern)), None)


def markdown() -> str:
    """Returns docs/metrics.md."""
    lines = [INTRODUCTION, *_table(LINES)]
    for role, names in SCRAPES.items():
        lines += ["", f"## {role}", "", *_table(names)]
    return "\n".join(lines) + "\n"


def _table(texts: dict[str, str]) -> list[str]:
    return ["| metric | meaning |", "|---|---|", *(f"| `{name}` | {text} |" for name, text in texts.items())]


INTRODUCTION = """# Metrics

`python -m docs.pages` writes this page from docs/catalog.py. [operations.md](operations.md) shows how to
look at these metrics, and which alerts watch them.

## metrics.jsonl

A line per step, with `phase` and `step`. TensorBoard and other monitors (`topology.monitors`) get the same values, and the learner's
`/metrics` has them as `intellax_learner_metric{name="loss/total"}`.
"""

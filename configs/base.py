"""All fields of a run with their defaults. Experiments start from here and change a dozen lines.

Only numbers, strings, and tuples. Values that follow from other fields (paths, batch sizes) are derived after the command line was
parsed, in `rl/experiment/experiment.py`.
"""

from ml_collections import config_dict


def get_config() -> config_dict.ConfigDict:
    """Returns the default config, locked except for options of environments, losses, and chat templates."""
    c = config_dict.ConfigDict()
    c.seed = 0  # of all random draws: parameters, task order, sampling
    # The checkpoint to start from: a Hugging Face folder, its gs:// or s3:// URL, a hub ID, a GGUF file, or the working directory of
    # another run (its newest policy at the first start); "": random parameters. Fields of `model` and `tokenizer` that a config file
    # or the command line sets replace those of the checkpoint, if the parameters still fit.
    c.init_from = ""

    # The policy: a Qwen3-type decoder. models/config.py explains each field and lists the choices.
    c.model = m = config_dict.ConfigDict()
    m.vocab_size = 272  # byte-level tokenizer: 265 entries, padded so that tensor axes up to 16 divide it
    m.update(model_dim=128, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=32, ffn_dim=384)
    m.update(rope_theta=10000.0, norm_eps=1e-6, qk_norm=True, tie_embeddings=True)
    m.update(num_experts=0, experts_per_token=0, expert_ffn_dim=0, first_dense_layers=0, norm_topk=True)
    # param_dtype is of the base of adapters, and of an exported checkpoint: parameters that train are float32. dtype: "bfloat16" on
    # accelerators. "auto": that, and "float32" on a CPU and for parameters that train (rl/experiment/plan/sizes.py)
    m.update(param_dtype="float32", dtype="float32")
    # Recomputed in the backward pass: "block" (each layer), "dots" (all but matmuls), "attention" (all but it), "offload"; "auto": chosen
    m.remat = "none"
    m.family = "qwen3"  # the model family whose tensor names a saved checkpoint has
    m.max_positions = 0  # positions the model was trained for; 0: unknown
    # Blocks.
    m.update(norm="rms", post_norms=False, scale_embeddings=False)
    m.update(activation="silu", clamp_limit=7.0, clamp_alpha=1.702, ffn_bias=False, final_softcap=0.0)
    # Attention.
    m.update(qkv_bias=False, out_bias=False, sinks=False, window=0, layer_pattern="F")
    m.attention_scale = 0.0  # 0: head_dim ** -0.5
    # Rotary positions.
    m.update(rope_dim=0, rope_interleaved=False, rope_local_theta=0.0)
    m.update(rope_scaling="none", rope_factor=1.0, rope_original_positions=0)
    m.update(rope_low_freq=1.0, rope_high_freq=4.0)  # of "llama3"
    m.update(rope_beta_fast=32.0, rope_beta_slow=1.0, rope_truncate=True, rope_attention_factor=0.0)  # of "yarn"
    m.update(rope_mscale=0.0, rope_mscale_all_dim=0.0)
    # Multi-head latent attention, if kv_latent_dim is above 0.
    m.update(kv_latent_dim=0, q_latent_dim=0, value_dim=0)
    # Mixture of experts.
    m.update(router="softmax", router_bias=False, router_correction=False, router_groups=1, router_groups_kept=1)
    m.update(routed_scale=1.0, num_shared_experts=0, expert_bias=False)
    m.mixture_every = 1  # layer n is an MoE layer if n + 1 is a multiple of this ...
    m.dense_layers = ()  # ... and n is not listed here
    # Execution.
    m.scan_layers = False  # stack equal layers and scan them: compile time is flat in depth
    m.attention = "auto"  # "xla", "splash" (TPU), "triton" (GPU)
    m.grouped_matmul = "auto"  # "ragged_dot", "megablox" (TPU), "triton" (GPU)
    m.reduce_dtype = (
        "auto"  # devices sum gradients in the dtype of activations, or in "float32", which sends twice the bytes
    )

    c.tokenizer = "byte_chatml"  # the embedded one, a directory with tokenizer.json, or a hub ID
    # Variables of the chat template, such as enable_thinking=False, in all processes of the run and in its server's chats by default.
    c.chat_template_kwargs = config_dict.ConfigDict()
    c.tokenizer_date = "2026-01-01"  # the date for chat templates: prompts must not depend on the day of the run

    # Axes of the learner's device mesh; one of them may be -1 and takes the remaining devices.
    c.mesh = config_dict.ConfigDict(dict(data=1, fsdp=-1, expert=1, context=1, tensor=1))
    # Devices of each host for its inference engine alone, in topology.mode "colocated": weights go there directly, and with max_lag
    # above 0 rollouts go on during a train step. 0: learner and engine take turns on all devices.
    c.mesh.rollout_devices = 0

    # The environment: a name of rl.envs.ENVS, as "reverse_text" or "reasoning_gym:<dataset>", an entry point of an installed package,
    # or your own "module:function" or "path/to/file.py:function" (docs/bring_your_own.md).
    c.env = e = config_dict.ConfigDict(dict(name="reverse_text", options={}))  # `options` go to its builder
    e.num_tasks = 0  # training tasks, each of them once per epoch; 0: those of a dataset, else as many as the run needs
    # An episode of several calls (rl/envs/interface/episode.py) begins no further call after so many, or after so many sampled tokens.
    e.max_calls = 0  # 0: 64 if the environment has such episodes, else 1
    e.max_episode_tokens = 0  # 0: no limit
    # Reasoning of earlier turns: "keep" it in the prompt, as it was sampled, or "strip" it at each user message, which begins a branch.
    e.thinking = "keep"
    e.digest = ""  # derived: SHA-256 of its code and data, on which all processes of a run must agree
    # Several environments instead of `env`, by names of your choice, as in c.envs.sums = dict(name="reasoning_gym:chain_sum", ratio=2.0).
    # Fields are those of `env`; `ratio`, its part of the groups; `weight`, a factor on its loss; and samples_per_prompt, temperature,
    # max_tokens, advantage, normalize, credit, branch_weight, overlong_buffer, max_calls, max_episode_tokens, and thinking, whose defaults
    # are the run's (docs/environments.md).
    c.envs = config_dict.ConfigDict()

    # Supervised warm-up on solved tasks, before RL. 0 steps: none.
    c.warmup = w = config_dict.ConfigDict()
    w.update(num_steps=0, tasks_per_step=64, learning_rate=2e-3)
    w.rate_steps = 20  # over which the rate rises from 0
    w.decoy_fraction = 0.0  # fraction of tasks with a wrong solution (the environment's decoy), for RL to correct
    # Conversations to imitate instead, {"messages": [...], "tools": [...]} or {"prompt": ..., "completion": ...} per row: a file (JSONL, Parquet, ...) or a folder, or several
    # with commas between them. All are checked before the first step: one that is longer than inference.max_model_len is refused.
    w.data = ""
    w.weights = ()  # parts of the files in each batch, a number for each; (): all rows alike
    w.digest = ""  # derived: SHA-256 of these files, which a resume must find unchanged
    w.roles = ("assistant",)  # the roles whose messages are trained on
    w.eval_every = 0  # steps between two losses on held-out examples; 0: never
    w.eval_tasks = 64  # held-out examples; the last rows of data files
    w.patience = 0  # stop after this many such losses without a new best; 0: never

    # Reinforcement learning.
    c.rl = r = config_dict.ConfigDict()
    r.num_steps = 100
    r.prompts_per_step = 32  # P: groups in a batch; 0: as many as make 256 rollouts, 64 on a CPU
    r.samples_per_prompt = 8  # G: rollouts in a group
    r.loss = "two_sided_clip"  # a name of rl.learning.algorithms.losses.LOSSES, or your own "module:function"
    r.loss_function = config_dict.placeholder(object)  # a config file's own function; rl.loss then names its options
    # A name of rl.learning.algorithms.advantages.ADVANTAGES, or your own "module:function" of [G] rewards.
    r.advantage = "group_mean"
    r.metrics = ()  # your own "module:function", each (groups of rollouts) -> {name: number}, for metrics own/NAME
    r.digest = ""  # derived: hashes of the code of your own advantage and metrics
    r.normalize = "none"  # advantages over the whole batch: a name of rl.learning.algorithms.advantages.NORMALIZERS
    # The units of equal weight in the loss: tokens of groups with a signal, "batch" (of all groups), "samples", or "prompts"
    r.average = "tokens"
    # "turn": the rewards turn_1, turn_2, ... of an environment each count for their turn and those before it; "episode": for all turns
    r.credit = "episode"
    # "vine": values of states inside completions (VinePPO, c.vine), for an environment of one call, with rl.advantage = "rloo" and max_lag = 0
    r.branch_weight = 1.0  # of the tokens in an episode's branches after the first, such as calls of a sub-model
    r.overlong_buffer = 0  # tokens before sampling.max_tokens over which the reward falls by 1 (DAPO); 0: off
    r.max_lag = 1  # batch n may be generated by versions >= n - 1 - max_lag; 0 is synchronous
    r.max_off_policy = 8  # versions; rollouts with an older token are dropped at hand-off, which matters below max_lag
    # "prescribed": batch n waits for the next groups of the run's order; "first": it takes the first ones that are eligible
    r.batch = "prescribed"
    r.oversampling = 1.0  # groups on their way, as a multiple of those that the open batches need
    r.refill = 0.0  # groups without a signal that others replace, at most, as a multiple of prompts_per_step
    r.gate = 0.0  # such a group has no advantage that is farther than this from 0
    # Tasks by the results of earlier batches: "pools" or "levels" (rl/protocol/curriculum.py); "": in the order of the seed
    r.curriculum = ""
    r.score_errors = (
        "leave out"  # samples for which the scorer raised, of their group and of the batch; "zero": they are worth 0
    )
    r.min_group = 0  # with "leave out", a group in which fewer samples were scored trains nothing; 0: any number
    r.tokens_per_step = 0  # a batch ends with the group that brings its sampled tokens to this; 0: by groups alone

    # The curriculum, with rl.curriculum.
    c.curriculum = u = config_dict.ConfigDict()
    u.update(hard_below=0.25, easy_above=0.75)  # "pools": by the newest mean reward of a task's group
    u.update(hard_weight=0.2, normal_weight=1.0, easy_weight=0.2, unseen_weight=1.0)  # of a task in a draw
    u.drop_at = (
        0.0  # tasks with this mean reward or more are never drawn again (ScaleRL: 0.9), unless all have it; 0: off
    )
    # "levels", of an environment with env.options.ladder: the next one opens after so many groups of the highest with this mean reward
    u.update(level_up=0.9, level_groups=8)
    u.level_width = 4  # highest open levels from which tasks are drawn

    # With rl.credit = "vine" workers continue samples from the most uncertain of the states after each `step_tokens` tokens, up to
    # `max_states` of a sample, and until that is expected to cost `token_ratio` times the tokens of the group. It may cost more, such as 2.1
    # times at a ratio of 2.0 (rl/learning/algorithms/vine.py).
    c.vine = config_dict.ConfigDict(dict(num_continuations=3, step_tokens=32, max_states=4, token_ratio=2.0))

    # Options of the losses, each used by the loss of its name.
    c.loss_options = config_dict.ConfigDict()
    c.loss_options.two_sided_clip = config_dict.ConfigDict(dict(clip_low=0.2, clip_high=0.2, delta=4.0))
    c.loss_options.masked_importance_sampling = mis = config_dict.ConfigDict(dict(ratio_low=0.5, ratio_high=5.0))
    mis.stream_low = 0.0  # a rollout with a token of a smaller ratio is left out as a whole; 0: off
    mis.stream_high = 1e9  # the same for a larger ratio; ratios are at most e^20 = 5e8
    mis.update(geometric_low=0.0, geometric_high=1e9)  # bounds on the geometric mean of a rollout's ratios
    c.loss_options.dppo_tv = config_dict.ConfigDict(dict(low=0.2, high=0.2, kl_tau=1e-3))
    c.loss_options.ipo = config_dict.ConfigDict(dict(bound=0.1, kl_tau=1e-3))
    c.loss_options.grpo = grpo = config_dict.ConfigDict(dict(clip_low=0.2, clip_high=0.2))
    # A rollout with A < 0 whose tokens lost more than this many nats on average is left out (DeepSeek-V3.2's sequence mask); 0: off.
    grpo.off_policy_delta = 0.0
    # `length`: tokens of the generation budget; 0: sampling.max_tokens.
    c.loss_options.dr_grpo = config_dict.ConfigDict(dict(clip_low=0.2, clip_high=0.2, length=0.0))
    c.loss_options.dapo = config_dict.ConfigDict(dict(clip_low=0.2, clip_high=0.28))
    c.loss_options.gspo = config_dict.ConfigDict(dict(clip_low=3e-4, clip_high=4e-4))
    c.loss_options.gmpo = config_dict.ConfigDict(dict(log_clip=0.4))
    c.loss_options.sapo = config_dict.ConfigDict(dict(tau_positive=1.0, tau_negative=1.05))
    # With rl.advantage = "optimal". A learning rate near 5e-4 needs a beta near 0.1.
    c.loss_options.oapl = config_dict.ConfigDict(dict(beta=1e-3))
    c.loss_options.cispo = config_dict.ConfigDict(dict(ratio_low=0.0, ratio_high=5.0))
    c.loss_options.truncated_importance_sampling = config_dict.ConfigDict(dict(clip_low=0.2, clip_high=0.2, cap=2.0))
    c.loss_options.decoupled_ppo = config_dict.ConfigDict(dict(clip_low=0.2, clip_high=0.2))
    c.loss_options.cross_entropy = config_dict.ConfigDict()

    # Terms of the objective in addition to the policy loss (rl/learning/learner/objective.py).
    c.objective = b = config_dict.ConfigDict()
    b.old_logprobs = "sampler"  # ratios against the sampler; "learner": against the parameters before the batch
    b.optimizer_steps = 1  # per batch, each on another part of it
    b.entropy_coef = 0.0  # bonus on the entropy of trained tokens
    # Penalty on the divergence from kl_reference: a mean over trained tokens, but with the losses grpo, gspo, gmpo, and sapo a mean
    # over rollouts of means over their tokens, as in their papers.
    b.kl_coef = 0.0
    b.kl_estimator = "k3"  # "k1" (in the advantage only), "k2", "k3", "weighted_k3" (DeepSeek-V3.2: k3 times the ratio to the sampler)
    b.kl_place = "loss"  # or "advantage"
    b.kl_reference = "sampler"  # or "reference": reference_model
    b.policy_coef = 1.0  # of the policy loss; 0 together with teacher_coef: distillation only
    b.teacher_coef = 0.0  # distill reference_model on the sampled tokens (on-policy distillation)
    b.reference_model = ""  # a Hugging Face folder with the same tokenizer; "": the policy at the start of RL
    b.router_balance_coef = 0.0  # auxiliary loss that balances the experts (Switch Transformer)
    b.router_balance_rate = 0.0  # step of the routers' correction by load (DeepSeek-V3: 0.001)

    # Low-rank adapters (models/lora.py): with a rank above 0, RL trains only them, and so does the warm-up of a checkpoint
    # (`init_from`). `targets`: ends of parameter names; q, k and v stand for all projections of latent attention that make them.
    c.lora = config_dict.ConfigDict(dict(rank=0, alpha=32.0, targets=("q", "k", "v", "o", "gate", "up", "down")))

    # The layout of a batch. 0: chosen for the memory of the devices, and printed (rl/experiment/plan/sizes.py).
    c.train = t = config_dict.ConfigDict()
    t.row_length = 256  # tokens per packed row; 0: those of the longest rollout
    t.rows = 8  # rows of a micro-batch; gradients accumulate over as many as the batch needs
    t.share_prompts = True  # compute a group's prompt once; its samples attend to the one copy
    t.router_replay = False  # use the experts that the sampler used (R3); rollouts name them with a byte or two each

    c.optimizer = o = config_dict.ConfigDict()
    o.learning_rate = 3e-4  # of RL; the warm-up has its own
    o.update(warmup_steps=10, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0)
    o.clip_norm = 1.0  # 0: off
    o.name = "adamw"  # or "muon", "sgd", "sign" (rl/learning/learner/optimizers.py)
    o.momentum = 0.95  # of muon and sgd
    o.schedule = "constant"  # after the warm-up; or "linear", "cosine" down to final_rate
    o.total_steps = 0  # optimizer steps after which a falling rate is at its end; 0: those of the run
    o.decay_steps = 0  # of "linear": the number of steps at the end; 0: all after the warm-up
    o.final_rate = 0.0  # fraction of learning_rate at which a falling rate ends
    o.moment_dtype = "float32"  # of first moments and momenta: or "bfloat16"
    o.offload_moments = False  # optimizer state in host memory between steps

    # How rollouts are sampled.
    c.sampling = s = config_dict.ConfigDict()
    s.update(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)  # top_k = 0: off
    s.max_tokens = 16  # of a completion; 0: 1024 on accelerators, 64 on a CPU

    # The inference server. Its programs are compiled for these sizes. Slots of 0 are chosen as rows of 0 are, and a length of 0
    # is twice sampling.max_tokens, or less if the model was trained for fewer positions.
    c.inference = i = config_dict.ConfigDict()
    i.update(num_slots=64, max_model_len=64, prefill_batch=16)
    i.prefill_chunk = 512  # longer prompts are prefilled this many tokens at a time
    i.steps_per_call = 8
    # Pages of 64 tokens in the cache of keys and values, of which each slot takes as many as its tokens fill: for accelerators, where
    # they hold more sequences than slots of whole length (docs/decisions/inference.md). 0: each slot has room for max_model_len. -1: on a
    # TPU as many pages as these slots would fill, so that a step reads the pages in use alone; elsewhere 0.
    i.num_pages = 0
    # Mesh axes of the run's own server. In topology.mode "local" over the devices of its host; all 1: one device. In "colocated"
    # over the engine's devices, of which `data` takes those that the others leave; `tensor` of 0: the least that fits the memory.
    i.mesh = config_dict.ConfigDict(dict(data=1, fsdp=1, expert=1, tensor=1))

    # Checks of rollouts beyond their format.
    c.trust = tr = config_dict.ConfigDict()
    # A worker's groups are replayed at a rate that starts at 1 and falls with its record (rl/swarm/orchestrator/worker_health.py).
    tr.min_rate = 0.05  # the lowest rate
    tr.invited_rate = 0.125  # the first rate of the keys in topology.workers and of local workers
    # "http://HOST:PORT#KEY" of each `python -m rl.validator serve` that replays for this run; (): this process does.
    tr.validators = ()
    tr.quorum = 0  # validators that must agree on a group; 0: more than half of them
    tr.verdict_s = 300.0  # seconds that a validator has for one request, its first compilation and pull included
    tr.device = "auto"  # of the replays: "accelerator", "cpu"; "auto": cpu if the learner has several hosts. Sizes of 0 need "cpu"
    tr.max_attempts = 5  # rejections after which a worker is banned; the run ends if no other worker is active
    tr.margin = 0.02  # nats by which the noised logit of a claimed token may be below the largest
    tr.max_wrong_tokens = 0  # tokens of a rollout that may exceed the margin
    tr.logprob_tolerance = 1e-3  # claimed against replayed log-probability; 0.05 for bfloat16
    tr.routing_margin = 0.02  # nats by which a claimed expert may be below the best one left out; 0.2 for bfloat16
    # Workers that neither topology.workers nor the launcher names: "open" (anyone, one group until one is accepted), "invited"
    # (none), "stake" (keys with min_stake in stake_ledger), "work" (a proof of work of work_bits per key). "": "invited" if
    # topology.workers names keys, else "open".
    tr.admission = ""
    tr.stake_ledger = ""  # file of a ledger with the stakes, which its keeper may append to meanwhile
    tr.min_stake = 1
    tr.work_bits = 24  # 2^24 hashes: half a minute of one CPU core in Python, milliseconds on a GPU
    tr.pin_versions = "strangers"  # whose leases fix one policy version: or "all", "none"
    # The most that an environment with episodes may depend on if workers of strangers run it (`kind` in docs/environments.md): "pure", "replayed",
    # or "recorded": then no validator repeats its episodes, and their prompts and rewards are not verified.
    tr.environments = "replayed"
    tr.sandbox = "auto"  # scorers run without files and network; "require": refuse a machine that cannot; "off"
    # "auto": limits that the run measures on its own first rollouts (WORKDIR/bands.json, rl/trust/verification/run_bands.py); or a JSON file
    # of `python -m rl.validator calibrate`; "": the limits above, and no sequential tests of replays.
    tr.bands = "auto"

    # Held-out evaluation: greedy at temperature 0.
    c.evaluation = e = config_dict.ConfigDict()
    e.num_tasks = 200  # 0: 100 on accelerators, 64 on a CPU
    e.samples_per_task = 1  # k of avg@k and pass@k
    e.temperature = 0.0
    e.every = 0  # RL steps between evaluations; 0: only before and after
    # Further sets by name, of the first held-out tasks as well; each may set the four fields above, as in
    # e.sets.sampled = dict(num_tasks=50, samples_per_task=8, temperature=1.0, every=20). With several environments, a set takes its
    # tasks from them in turn, or from one of them: e.sets.sums = dict(env="sums").
    e.sets = config_dict.ConfigDict()
    e.hold_s = 600.0  # seconds for which a server keeps the version of an unfinished evaluation; then that is given up

    # Checkpoints, of which `keep` stay: every so many steps, and at the first end of a step so long after the last (0: by steps alone).
    c.checkpoint = config_dict.ConfigDict(dict(every=20, every_minutes=0.0, keep=3))

    # Trajectories that were trained on (rl/experiment/redaction.py): "drop" or "encrypt" those of steps that are `keep_steps` before the newest
    # checkpoint; their hashes stay. recipient: a public key of `python -m rl.rollouts key`.
    c.retention = config_dict.ConfigDict(dict(mode="keep", keep_steps=100, recipient=""))

    # Publishing of weights (sharding/weights/broadcast/publish.py), signed with the key <workdir>/weights.key.
    c.broadcast = b = config_dict.ConfigDict()
    b.snapshot_every = 1  # versions; only deltas between two snapshots (8 is good for relays)
    b.dtype = ""  # in which weights are published and served: wider floats are cast to it; "": model.dtype
    b.head_s = 86400.0  # until relays that withhold newer weights are refused; the run signs again before

    # The (first, last) train step of a profile of learner and inference servers in WORKDIR/profile; (): none.
    c.profile = config_dict.ConfigDict(dict(steps=()))

    # The hardware for rl.plan; no other command reads it.
    c.plan = n = config_dict.ConfigDict()
    n.topology = ""  # of the learner: <kind>:<dims>, as in "v5p:4x4x8"
    n.num_slices = 1  # of the learner, each of this topology; mesh.data spans them
    # Tokens of the rollouts whose train step it bounds: lognormal, cut at inference.max_model_len. Median of 0: all have that length.
    n.update(median_length=0, length_sigma=0.8)
    # Mesh axes of one inference server.
    n.server_mesh = config_dict.ConfigDict(dict(data=1, fsdp=1, expert=1, context=1, tensor=-1))

    # Processes and addresses. With several hosts, the same command runs on each (sharding/system/multihost/hosts.py). "colocated": each
    # host has an inference server in the learner's process, and workers as child processes. "local": the server is a child process,
    # too, which an accelerator does not allow. "auto": "colocated" on an accelerator, else "local". "remote": servers and workers
    # run elsewhere (python -m inference.serve, python -m rl.worker) and use the addresses below.
    c.topology = p = config_dict.ConfigDict()
    p.mode = "auto"
    p.num_workers = 1  # rollout workers that this run starts; in mode "colocated" on each host
    p.host = "127.0.0.1"  # listening address of the orchestrator
    p.port = 0  # 0: any free port
    p.metrics = ""  # [HOST:]PORT of /metrics and /health of learner and orchestrator, not for workers; "": none
    # Programs that get the metrics, in addition to metrics.jsonl: of "tensorboard", "wandb", "trackio", "mlflow" (docs/operations.md).
    p.monitors = ("tensorboard",)
    p.relay_host = "127.0.0.1"  # remote: listening address of the relay, which serves the weights
    p.relay_port = 0  # 0: any free port, which the run prints
    p.servers = ()  # remote: URLs of inference servers
    p.control_servers = ()  # remote: URLs of the control listeners of those servers (inference.serve --control)
    p.control_token_file = ""  # remote: file with their token, created if absent; "": WORKDIR/control.token
    p.server_keys = ()  # remote: public keys (hex) of servers, relays, and validators that sign in (--orchestrator, --key)
    p.workers = ()  # remote: public keys (hex) of invited workers; trust.admission is the rule for others
    # remote: URL of the control listener of `python -m rl.swarm.orchestrator`; "": the learner's process has the orchestrator.
    p.orchestrator = ""
    # Several hosts: HOST:PORT of the first, whose next port must also be free; "": detected on TPU pods; "auto": detected by JAX.
    p.coordinator = ""
    p.num_processes = 0  # of the learner; 0: from the environment
    p.process_id = -1  # number of this process, from 0; -1: from the environment
    # Folder of compiled programs, for child processes and later starts; "auto": $XDG_CACHE_HOME/intellax or ~/.cache/intellax;
    # "": none.
    p.compile_cache = "auto"
    p.join_s = 300.0  # seconds that hosts wait for each other at the start
    p.lease_s = 120.0  # seconds without a heartbeat of its worker until a lease expires
    p.heartbeat_s = 5.0  # seconds between two heartbeats of a node
    # Seconds without a server, or without a worker for open groups, after which the run ends: also for its own server's start.
    p.patience_s = 3600.0

    c.lock()  # a mistyped field is an error that names the nearest field
    # Any environments, losses of one's own, any number of evaluation sets, and the variables of any template.
    for open_ended in (c.env.options, c.envs, c.loss_options, c.evaluation.sets, c.chat_template_kwargs):
        open_ended.unlock()
    return c

"""Every field of a run, once, with its default. Experiments start from here and change a dozen lines.

Only numbers, strings and tuples. What follows from other fields (paths, batch sizes) is derived after the command line
was read, in `rl/experiment/experiment.py`.
"""

from ml_collections import config_dict


def get_config() -> config_dict.ConfigDict:
    c = config_dict.ConfigDict()
    c.seed = 0  # of everything drawn: parameters, task order, sampling
    c.init_from = (
        ""  # a Hugging Face folder or hub id to start from, of the architecture below; "": drawn from the seed
    )

    # The policy. A Qwen3-type decoder; see models/config.py for what each field means.
    c.model = m = config_dict.ConfigDict()
    m.vocab_size = 272  # byte-level tokenizer: 265 entries, padded so that tensor axes up to 16 divide it
    m.model_dim = 128
    m.num_layers = 3
    m.num_heads = 4
    m.num_kv_heads = 2
    m.head_dim = 32
    m.ffn_dim = 384
    m.rope_theta = 10000.0
    m.norm_eps = 1e-6
    m.qk_norm = True
    m.tie_embeddings = True
    m.num_experts = 0  # 0: dense
    m.experts_per_token = 0
    m.expert_ffn_dim = 0
    m.first_dense_layers = 0
    m.norm_topk = True
    m.param_dtype = "float32"
    m.dtype = "float32"  # "bfloat16" on accelerators
    m.remat = "none"  # what the backward pass recomputes: "block" (each layer), "dots" (all but matmuls), "offload"
    m.family = "qwen3"  # whose tensor names a saved checkpoint bears
    m.max_positions = 0  # positions the model was trained for; 0: not known
    m.norm = "rms"  # "rms_float32" (gpt-oss), "rms_plus_one" (Gemma)
    m.post_norms = False  # a second norm behind attention and ffn
    m.scale_embeddings = False  # embeddings times sqrt(model_dim)
    m.activation = "silu"  # "gelu", "clamped" (gpt-oss)
    m.clamp_limit = 7.0
    m.clamp_alpha = 1.702
    m.ffn_bias = False
    m.final_softcap = 0.0  # 0: off
    m.qkv_bias = False
    m.out_bias = False
    m.sinks = False  # a learned logit per head in the softmax
    m.window = 0  # tokens a sliding layer reads
    m.layer_pattern = "F"  # repeated over the layers: F full, S sliding
    m.attention_scale = 0.0  # 0: head_dim ** -0.5
    m.attention_softcap = 0.0  # 0: off
    m.rope_dim = 0  # dims of a head that rotate; 0: all
    m.rope_interleaved = False
    m.rope_local_theta = 0.0  # of sliding layers; 0: as the others
    m.rope_scaling = "none"  # "linear", "llama3", "yarn"
    m.rope_factor = 1.0
    m.rope_original_positions = 0
    m.rope_low_freq = 1.0
    m.rope_high_freq = 4.0
    m.rope_beta_fast = 32.0
    m.rope_beta_slow = 1.0
    m.rope_truncate = True
    m.rope_attention_factor = 0.0  # 0: derived from the factor
    m.rope_mscale = 0.0
    m.rope_mscale_all_dim = 0.0
    m.kv_latent_dim = 0  # 0: ordinary attention; else multi-head latent attention
    m.q_latent_dim = 0
    m.value_dim = 0  # 0: head_dim
    m.router = "softmax"  # "sigmoid" (GLM, DeepSeek), "topk_softmax" (gpt-oss)
    m.router_bias = False
    m.router_correction = False  # added to the scores for the choice alone
    m.router_groups = 1
    m.router_groups_kept = 1
    m.routed_scale = 1.0
    m.num_shared_experts = 0
    m.expert_bias = False
    m.mixture_every = 1  # layer n mixes if n + 1 is a multiple of it ...
    m.dense_layers = ()  # ... and it is not named here
    m.scan_layers = False  # stack equal layers and scan them: compile time is flat in depth
    m.attention = "auto"  # "xla", "splash" (TPU), "cudnn" (GPU)
    m.grouped_matmul = "auto"  # "ragged_dot", "megablox" (TPU)
    c.tokenizer = "byte_chatml"  # the embedded one, a directory with tokenizer.json, or a hub id
    c.tokenizer_date = "2026-01-01"  # what chat templates that ask for the day are told: a prompt never depends on it

    # Axes of the learner's device mesh; one of them may be -1 and takes what is left.
    c.mesh = config_dict.ConfigDict(dict(data=1, fsdp=-1, expert=1, context=1, tensor=1))

    # What is learned. `options` go to the environment's builder (rl/envs).
    c.env = config_dict.ConfigDict()
    c.env.name = "reverse_text"  # or "reasoning_gym:<dataset>"
    c.env.options = config_dict.ConfigDict()

    # Supervised warm-up on solved tasks, before RL. 0 steps: none.
    c.warmup = w = config_dict.ConfigDict()
    w.num_steps = 0
    w.tasks_per_step = 64
    w.learning_rate = 2e-3
    w.decoy_fraction = 0.0  # part of the tasks that are taught wrongly (the environment's decoy), for RL to put right
    w.data = ""  # a JSONL file of conversations to imitate instead: {"messages": [...], "tools": [...]} per line
    w.roles = ("assistant",)  # whose messages carry the loss
    w.eval_every = 0  # steps between two losses on held-out examples; 0: none
    w.eval_tasks = 64  # held-out examples; of a file, its last lines
    w.patience = 0  # stop after as many such losses without a new best; 0: never

    # Reinforcement learning.
    c.rl = r = config_dict.ConfigDict()
    r.num_steps = 100
    r.prompts_per_step = 32  # P: groups in a batch
    r.samples_per_prompt = 8  # G: rollouts in a group
    r.loss = "two_sided_clip"  # a name of rl.algorithms.losses.LOSSES
    r.loss_function = config_dict.placeholder(
        object
    )  # a config file's own, as in rl/algorithms/losses.py; rl.loss then names its options
    r.advantage = "group_mean"  # a name of rl.advantages.ADVANTAGES
    r.normalize = "none"  # advantages over the whole batch: a name of rl.advantages.NORMALIZERS
    r.average = "tokens"  # what weighs alike: "tokens", "samples", "prompts" (rl.advantages.AVERAGES)
    r.overlong_buffer = 0  # tokens before sampling.max_tokens over which the reward falls by 1 (DAPO); 0: off
    r.max_lag = 1  # batch n may be generated by versions >= n - 1 - max_lag; 0 is synchronous
    r.max_off_policy = 8  # below max_lag: rollouts whose oldest token is further behind are dropped at hand-off

    # Constants of the losses, each used by the loss of its name.
    c.loss_options = config_dict.ConfigDict()
    c.loss_options.two_sided_clip = config_dict.ConfigDict(dict(clip_low=0.2, clip_high=0.2, delta=4.0))
    c.loss_options.masked_importance_sampling = mis = config_dict.ConfigDict(dict(ratio_low=0.5, ratio_high=5.0))
    mis.stream_low = 0.0  # a stream with a token of a smaller ratio is left out as a whole; 0: off
    mis.stream_high = 1e9  # the same for a larger ratio; ratios are at most e^20 = 5e8
    mis.geometric_low = 0.0  # bounds on the geometric mean of a stream's ratios
    mis.geometric_high = 1e9
    c.loss_options.dppo_tv = config_dict.ConfigDict(dict(low=0.2, high=0.2, kl_tau=1e-3))
    c.loss_options.ipo = config_dict.ConfigDict(dict(bound=0.1, kl_tau=1e-3))
    c.loss_options.grpo = config_dict.ConfigDict(dict(clip_low=0.2, clip_high=0.2))
    c.loss_options.dr_grpo = config_dict.ConfigDict(dict(clip_low=0.2, clip_high=0.2))
    c.loss_options.dr_grpo.length = 0.0  # tokens of the generation budget; 0: sampling.max_tokens
    c.loss_options.dapo = config_dict.ConfigDict(dict(clip_low=0.2, clip_high=0.28))
    c.loss_options.gspo = config_dict.ConfigDict(dict(clip_low=3e-4, clip_high=4e-4))
    c.loss_options.gmpo = config_dict.ConfigDict(dict(log_clip=0.4))
    c.loss_options.cispo = config_dict.ConfigDict(dict(ratio_low=0.0, ratio_high=5.0))
    c.loss_options.truncated_importance_sampling = config_dict.ConfigDict(dict(clip_low=0.2, clip_high=0.2, cap=2.0))
    c.loss_options.decoupled_ppo = config_dict.ConfigDict(dict(clip_low=0.2, clip_high=0.2))
    c.loss_options.cross_entropy = config_dict.ConfigDict()

    # What a step optimises beside the policy loss (rl/learner/train_step.py: Objective).
    c.objective = b = config_dict.ConfigDict()
    b.old_logprobs = "sampler"  # ratios against the sampler; "learner": against the parameters before the batch
    b.optimizer_steps = 1  # per batch, each on its own part of it
    b.entropy_coef = 0.0  # bonus on the entropy of trained tokens
    b.kl_coef = 0.0  # penalty on the divergence from kl_reference
    b.kl_estimator = "k3"  # "k1" (in the advantage only), "k2", "k3"
    b.kl_place = "loss"  # or "advantage"
    b.kl_reference = "sampler"  # or "reference": reference_model
    b.policy_coef = 1.0  # of the policy loss; 0 beside teacher_coef is distillation alone
    b.teacher_coef = 0.0  # distil reference_model on what was sampled (on-policy distillation)
    b.reference_model = ""  # a Hugging Face folder with the same tokenizer; "": the policy that RL began with
    b.router_balance_coef = 0.0  # auxiliary loss on the load of experts (Switch Transformer)
    b.router_balance_rate = 0.0  # step of the routers' correction by load (DeepSeek-V3: 0.001)

    # Low-rank adapters: with a rank above 0, RL trains them and the model stays (rl/learner/lora.py).
    c.lora = config_dict.ConfigDict(dict(rank=0, alpha=32.0))
    c.lora.targets = ("q", "k", "v", "o", "gate", "up", "down")  # parameters by the last part of their name

    # How a batch is laid out and stepped through.
    c.train = t = config_dict.ConfigDict()
    t.row_length = 256  # tokens per packed row
    t.rows = 8  # rows of a micro-batch; gradients accumulate over as many as the batch needs
    t.share_prompts = True  # compute a group's prompt once; its samples attend to the one copy
    t.router_replay = False  # run the experts that the sampler ran (R3): rollouts say which, a byte or two each

    c.optimizer = o = config_dict.ConfigDict()
    o.learning_rate = 3e-4  # of RL; the warm-up has its own
    o.warmup_steps = 10
    o.beta1 = 0.9
    o.beta2 = 0.95
    o.eps = 1e-8
    o.weight_decay = 0.0
    o.clip_norm = 1.0  # 0: off
    o.name = "adamw"  # or "muon", "sgd", "sign" (rl/learner/optimizers.py)
    o.momentum = 0.95  # of muon and sgd
    o.schedule = "constant"  # after the warm-up; or "linear", "cosine" down to final_rate
    o.total_steps = 0  # optimizer steps of the run, where the rate falls
    o.decay_steps = 0  # of "linear": how many at the end; 0: all after the warm-up
    o.final_rate = 0.0  # part of learning_rate that a falling rate ends at
    o.moment_dtype = "float32"  # of first moments and momenta: or "bfloat16"
    o.offload_moments = False  # optimizer state in host memory between steps

    # How rollouts are sampled.
    c.sampling = s = config_dict.ConfigDict()
    s.temperature = 1.0
    s.top_k = 0  # 0: off
    s.top_p = 1.0
    s.min_p = 0.0
    s.max_tokens = 16  # of a completion

    # The rollout server. Sizes are compiled in.
    c.inference = i = config_dict.ConfigDict()
    i.num_slots = 64
    i.max_model_len = 64
    i.prefill_batch = 16
    i.prefill_chunk = 512  # longer prompts are prefilled this many tokens at a time
    i.steps_per_call = 8
    i.mesh = config_dict.ConfigDict(
        dict(data=1, fsdp=1, expert=1, tensor=1)
    )  # of the local server, over its host's devices; all 1: one device

    # Trust: what is checked of each rollout beyond its form.
    c.trust = tr = config_dict.ConfigDict()
    tr.check_fraction = 0.125  # of groups whose proofs and sampling are replayed
    tr.device = "auto"  # of the replays: "accelerator", "cpu"; "auto": cpu if the learner has several hosts
    tr.max_attempts = 5  # a worker refused this often gets no more work; the run ends when nobody else is there
    tr.margin = 0.02  # noised-logit gap, in nats, up to which a claimed token counts as the argmax
    tr.max_wrong_tokens = 0  # per rollout, beyond the margin
    tr.logprob_tolerance = 1e-3  # claimed against replayed log-probability; 0.05 for bfloat16
    tr.routing_margin = 0.02  # nats of a router's logits by which a claimed expert may miss the best; 0.2 for bfloat16
    tr.bands = ""  # JSON of `python -m rl.validator calibrate`; "": the limits above, and nothing summed per worker

    # Held-out evaluation: greedy at temperature 0.
    c.evaluation = e = config_dict.ConfigDict()
    e.num_tasks = 200
    e.samples_per_task = 1  # k of avg@k and pass@k
    e.temperature = 0.0
    e.every = 0  # RL steps between evaluations; 0: only before and after

    c.checkpoint = k = config_dict.ConfigDict()
    k.every = 20  # steps
    k.keep = 3

    # How weights are published (sharding/broadcast/pull.py); signed with the key <workdir>/weights.key.
    c.broadcast = b = config_dict.ConfigDict()
    b.snapshot_every = 1  # versions; between two snapshots only deltas are written (8 where relays carry them)
    b.dtype = ""  # floats wider than this are cast to it on the device; "": as they are

    # What the run is planned for; read by rl/plan/plan.py alone.
    c.plan = n = config_dict.ConfigDict()
    n.topology = ""  # of the learner: <kind>:<dims>, as in "v5p:4x4x8"
    n.server_mesh = config_dict.ConfigDict(
        dict(data=1, fsdp=1, expert=1, context=1, tensor=-1)
    )  # of one rollout server

    # Who runs what. Over several hosts the same command runs on each (sharding/multihost/hosts.py). "local": servers and workers are child processes on this machine. "remote": they were started
    # elsewhere (python -m inference.serve, python -m rl.worker) and meet at the addresses below.
    c.topology = p = config_dict.ConfigDict()
    p.mode = "local"
    p.num_workers = 1  # local rollout workers
    p.host = "127.0.0.1"  # where the orchestrator listens
    p.port = 0  # 0: any free port
    p.relay_host = (
        "127.0.0.1"  # remote: where the relay listens from which servers and further relays fetch the weights
    )
    p.relay_port = 0  # 0: any free port; the run says which
    p.servers = ()  # remote: URLs of rollout servers
    p.workers = ()  # remote: public keys (hex) of workers that may submit; empty: any signed rollout
    p.coordinator = (
        ""  # several hosts: HOST:PORT of the first, its next port free too; "": found on TPU pods; "auto": asks JAX
    )
    p.num_processes = 0  # of the learner; 0: from the environment
    p.process_id = -1  # of this one, from 0; -1: from the environment
    p.join_s = 300.0  # how long hosts wait for each other at the start
    p.lease_s = 120.0  # a worker that took tasks and is silent for this long loses them

    c.lock()  # a field that an experiment mistypes is refused, with the nearest
    for open_ended in (c.env.options, c.loss_options):  # of whatever environment, and of losses of one's own
        open_ended.unlock()
    return c

"""Small checkpoints of every family with dims and switches that the stored ones do not have, against transformers.

transformers draws and saves them in another interpreter (INTELLAX_TORCH_PYTHON, or this one), in one process for all; its
logits are the oracle. Each variant is here because reading its config.json takes a default, a corner or a rule of its own.
"""

import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest

from models import hf, transformer

# 24 tokens in float32: right implementations differ by 1e-5 (order of sums), a wrong switch by 0.1 or more.
LOGIT_ATOL = 1e-4

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1000.0}
MIXTURE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 12}
GLM = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_shared_experts": 1}
DEEPSEEK = GLM | {"kv_lora_rank": 20, "q_lora_rank": 18, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6}
DEEPSEEK |= {"v_head_dim": 14, "num_key_value_heads": 4, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1}
GPT_OSS = {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 5, "head_dim": 12}
GEMMA = {"sliding_window": 4, "num_hidden_layers": 4, "head_dim": 14}
MIXED_LAYERS = ["full_attention", "sliding_attention"] * 2

VARIANTS = {
    "llama_heads": ("Llama", dict(head_dim=18, num_attention_heads=5, num_key_value_heads=1)),
    "llama_linear": ("Llama", dict(rope_parameters={"rope_type": "linear", "factor": 3.0, "rope_theta": 1000.0})),
    "llama_yarn_factors": ("Llama", dict(rope_parameters=YARN | {"attention_factor": 1.3, "beta_fast": 8.0})),
    "llama_yarn_mscale": ("Llama", dict(rope_parameters=YARN | {"mscale": 0.7, "mscale_all_dim": 1.2})),
    "llama_f16": ("Llama", dict(dtype="float16", hidden_act="gelu_pytorch_tanh")),
    "llama_bf16_shards": ("Llama", dict(dtype="bfloat16", shards="9KB", tie_word_embeddings=True)),
    "qwen2_pattern": (
        "Qwen2",
        dict(use_sliding_window=True, sliding_window=4, layer_types=["sliding_attention", *MIXED_LAYERS[:2]]),
    ),
    "qwen3_window": ("Qwen3", dict(head_dim=26, use_sliding_window=True, sliding_window=3, max_window_layers=2)),
    "qwen3_moe_window": ("Qwen3Moe", MIXTURE | dict(use_sliding_window=True, sliding_window=4, norm_topk_prob=True)),
    "qwen3_moe_all": ("Qwen3Moe", MIXTURE | dict(num_experts=4, num_experts_per_tok=4, decoder_sparse_step=2)),
    "glm_odd_rotation": ("Glm4Moe", GLM),  # no head_dim: 40 / 4 = 10, of which half rotate
    "glm_no_shared": ("Glm4Moe", GLM | dict(head_dim=16, n_shared_experts=0, first_k_dense_replace=0)),
    "glm_dense_groups": ("Glm4Moe", GLM | dict(head_dim=12, n_group=4, topk_group=2, partial_rotary_factor=1.0)),
    "glm_all_dense": ("Glm4Moe", GLM | dict(head_dim=16, first_k_dense_replace=5, use_qk_norm=True)),
    "deepseek_bias": ("DeepseekV3", DEEPSEEK | dict(attention_bias=True, n_shared_experts=2)),
    "deepseek_plain_query": ("DeepseekV3", DEEPSEEK | dict(q_lora_rank=None, rope_interleave=False)),
    "deepseek_yarn": ("DeepseekV3", DEEPSEEK | dict(rope_parameters=YARN | {"mscale": 0.8, "mscale_all_dim": 0.5})),
    "gpt_oss_no_rope_stated": ("GptOss", GPT_OSS | dict(attention_bias=False, swiglu_limit=1.5)),
    "gpt_oss_plain_rope": (
        "GptOss",
        GPT_OSS
        | dict(rope_parameters={"rope_type": "default", "rope_theta": 1000.0}, layer_types=["full_attention"] * 3),
    ),
    "gemma_softcaps": ("Gemma3Text", GEMMA | dict(final_logit_softcapping=3.0, attn_logit_softcapping=2.0)),
    "gemma_ropes": (
        "Gemma3Text",
        GEMMA
        | dict(layer_types=MIXED_LAYERS, attention_bias=True, tie_word_embeddings=False)
        | dict(rope_parameters={"full_attention": YARN, "sliding_attention": {"rope_theta": 50.0}}),
    ),
    "gemma_full": ("Gemma3Text", GEMMA | dict(layer_types=["full_attention"] * 4, query_pre_attn_scalar=21)),
}

PROGRAM = """
import json, pathlib, sys
import numpy as np, torch, transformers
root = pathlib.Path(sys.argv[1])
dims = dict(vocab_size=67, hidden_size=40, intermediate_size=56, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=64, rms_norm_eps=1e-5)
for number, (name, (family, options)) in enumerate(json.loads(sys.argv[2]).items()):
    torch.manual_seed(number)
    options = dims | options
    dtype, shards = getattr(torch, options.pop("dtype", "float32")), options.pop("shards", "5GB")
    config = getattr(transformers, family + "Config")(**options)
    model = getattr(transformers, family.removesuffix("Text") + "ForCausalLM")(config)
    corrections = [(key, x) for key, x in model.named_buffers() if "e_score_correction_bias" in key]
    with torch.no_grad():
        for key, x in [*model.named_parameters(), *corrections]:
            if "norm" in key:
                x.copy_(torch.rand_like(x) + (-0.5 if family == "Gemma3Text" else 0.5))
            elif "bias" in key or "sinks" in key:
                x.copy_(0.3 * torch.randn_like(x))
            else:
                fan_in = x.shape[1] if x.ndim == 3 and family == "GptOss" else x.shape[-1]
                x.copy_(torch.randn_like(x) * max(fan_in, 1) ** -0.5)
    model.to(dtype).save_pretrained(root / name, max_shard_size=shards)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        root / name, dtype=torch.float32, attn_implementation="eager").eval()
    tokens = torch.randint(0, 67, (2, 24))
    with torch.no_grad():
        np.savez(root / name / "oracle.npz", tokens=tokens, logits=model(tokens).logits)
"""


def run_torch(*args):
    python = os.environ.get("INTELLAX_TORCH_PYTHON", sys.executable)
    if subprocess.run([python, "-c", "import torch, transformers"], capture_output=True).returncode:
        pytest.skip(f"{python} has no torch and transformers; pip install torch transformers")
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run([python, "-c", *args], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("variants")
    run_torch(PROGRAM, str(root), json.dumps(VARIANTS))
    jax.config.update("jax_disable_most_optimizations", True)  # each program runs once
    yield root
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_logits_are_those_of_transformers(name, folders, tmp_path):
    """Compares the logits as loaded, and as loaded again from our saved folder."""
    oracle = np.load(folders / name / "oracle.npz")
    hf.save(tmp_path / "again", *hf.load(folders / name))
    for folder in (folders / name, tmp_path / "again"):
        config, params = hf.load(folder, dtype="float32")

        @jax.jit
        def logits(params, tokens_BT, config=config):
            return transformer.logits(params, config, transformer.apply(params, config, tokens_BT)[0])

        got = logits(params, oracle["tokens"].astype(np.int32))
        np.testing.assert_allclose(got, oracle["logits"], rtol=0, atol=LOGIT_ATOL)


RELOAD = """
import pathlib, sys
import numpy as np, torch, transformers
for folder in pathlib.Path(sys.argv[1]).iterdir():
    oracle = np.load(pathlib.Path(sys.argv[2]) / folder.name / "oracle.npz")
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
    missing = [key for key in info["missing_keys"] if model.get_parameter(key).numel()]  # without shared experts, theirs are empty
    assert not missing and not any(info[key] for key in ("unexpected_keys", "mismatched_keys")), info
    with torch.no_grad():
        logits = model.eval()(torch.as_tensor(oracle["tokens"])).logits.numpy()
    print(folder.name, np.abs(logits - oracle["logits"]).max())
"""


@pytest.mark.slow
def test_transformers_reads_the_variants_we_save(folders, tmp_path):
    for name in VARIANTS:
        hf.save(tmp_path / name, *hf.load(folders / name))
    lines = run_torch(RELOAD, str(tmp_path), str(folders)).splitlines()
    errors = {line.split()[0]: float(line.split()[1]) for line in lines}
    assert errors.keys() == VARIANTS.keys()
    assert {name: error for name, error in errors.items() if error > LOGIT_ATOL} == {}

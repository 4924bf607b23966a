"""Checkpoints against transformers' own numbers, and the rejections at the border.

The oracle is fixtures/hf_parity (its README lists the contents): logits, experts, greedy continuations, loss and gradient
norms that transformers computed. INTELLAX_HF_PARITY names a folder of further variants in the same form.
"""

import collections
import dataclasses
import functools
import json
import math
import os
import pathlib
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import presets
from inference.engine import kv_cache
from models import config as config_lib
from models import hf, hub, layers, transformer
from models.hf import checkpoint, safetensors_file, tensor_check, tensor_names
from models.hf import config as hf_config
from models.text import tokenizer as tokenizer_lib
from sharding.mesh import mesh as mesh_lib
from sharding.mesh import rules
from tests.support import cases, commands, stacking, tiny

FIXTURES = pathlib.Path(__file__).parents[2] / "fixtures" / "hf_parity"
FOLDERS = {path.parent.name: path.parent for path in sorted(FIXTURES.glob("*/parity.npz"))}
if more := os.environ.get("INTELLAX_HF_PARITY"):
    FOLDERS = {path.parent.name: path.parent for path in sorted(pathlib.Path(more).glob("*/parity.npz"))} | FOLDERS

# Two right implementations differ by 2e-5 (padding, order of sums); a wrong epsilon by 7e-4 (meta.json of the variants).
LOGIT_ATOL = 1e-4
FAST = "qwen3moe_mixed"  # whose gradients are computed in fast tests, too

pytestmark = pytest.mark.usefixtures("compile_fast")


@functools.cache
def loaded(name):
    return hf.load(FOLDERS[name], dtype="float32")


@functools.cache
def expected(name):
    return dict(np.load(FOLDERS[name] / "parity.npz")), json.loads((FOLDERS[name] / "meta.json").read_text())


@functools.cache
def computed(name, gradient=False):
    """(logits, experts, loss, gradients or None) of the variant's rows, from one program; gradients take most of its compilation."""
    config, params = loaded(name)
    tokens_BT, mask_BT = (expected(name)[0][key] for key in ("input_ids", "attention_mask"))

    @jax.jit
    def run(params, tokens_BT, mask_BT):
        def loss(params):
            hidden_BTD, routing = transformer.apply(params, config, tokens_BT, segment_ids_BT=mask_BT)
            logits_BTV = transformer.logits(params, config, hidden_BTD)
            logp_BTV = jax.nn.log_softmax(logits_BTV[:, :-1], axis=-1)
            logp_BT = jnp.take_along_axis(logp_BTV, tokens_BT[:, 1:, None], axis=-1)[..., 0]
            weight_BT = mask_BT[:, 1:].astype(jnp.float32)
            return -(logp_BT * weight_BT).sum() / weight_BT.sum(), (logits_BTV, routing)

        if gradient:
            (value, (logits_BTV, routing)), grads = jax.value_and_grad(loss, has_aux=True)(params)
        else:
            (value, (logits_BTV, routing)), grads = loss(params), None
        return logits_BTV, None if routing is None else routing.experts, value, grads

    return jax.tree.map(np.asarray, run(params, tokens_BT, mask_BT))


# ---- transformers' numbers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FOLDERS)
def test_logits_experts_and_loss_are_those_of_transformers(name):
    numbers, _ = expected(name)
    logits_BTV, experts_LBTX, loss, _ = computed(name, gradient=name == FAST)
    mask_BT = numbers["attention_mask"].astype(bool)
    np.testing.assert_allclose(logits_BTV[mask_BT], numbers["logits"][mask_BT], rtol=0, atol=LOGIT_ATOL)
    np.testing.assert_allclose(loss, numbers["loss"], rtol=1e-5)  # a mean of some 50 of them
    if "topk_idx" in numbers:
        np.testing.assert_array_equal(np.sort(experts_LBTX, axis=-1)[:, mask_BT], numbers["topk_idx"][:, mask_BT])
    else:
        assert experts_LBTX is None


@pytest.mark.parametrize("name", cases.slow_but(FOLDERS, FAST))
def test_gradient_norms_are_those_of_transformers(name):
    """The norm of every tensor's gradient, within 1e-3: float32 gradients through 2 to 6 layers differ by 1e-5 or so.

    In memory transformers fuses a layer's experts into gate_up_proj and down_proj; the norms are of those.
    """
    config, _ = loaded(name)
    grads = tensor_names.leaves(computed(name, gradient=True)[3])
    squares = collections.Counter()
    for tensor_name, tensor in tensor_names.tensors(config).items():
        before, found, after = tensor_name.partition(".mlp.experts.")
        if found and after[0].isdigit():
            kind = "down_proj" if "down_proj" in after else "gate_up_proj"
            tensor_name = f"{before}.mlp.experts.{kind}"
        for part in tensor.parts:
            grad = np.asarray(grads[part.path], np.float64)
            squares[tensor_name] += (grad[part.index] ** 2).sum()
    norms = expected(name)[1]["grad_norm"]
    buffers = {tensor_name for tensor_name in squares if tensor_name.endswith("e_score_correction_bias")}
    assert all(squares.pop(buffer) == 0 for buffer in buffers)  # moved by load, never by gradient
    assert squares.keys() == norms.keys()
    for tensor_name, norm in norms.items():
        assert math.isclose(math.sqrt(squares[tensor_name]), norm, rel_tol=1e-3), tensor_name


@pytest.mark.parametrize("name", cases.slow_but(FOLDERS, "deepseek_v3", "qwen2_tied_bf16"))
def test_greedy_decoding_over_the_cache_follows_transformers(name):
    """One token at a time, the prompt too; and its logits are those of `apply` on the finished sequence."""
    config, params = loaded(name)
    numbers, _ = expected(name)
    prompt_P, new_N = numbers["greedy_prompt"], numbers["greedy_ids"]
    T = len(prompt_P) + len(new_N)

    @jax.jit
    def decode(params, prompt_P):
        def step(carry, position):
            token_11, cache = carry
            token_11 = jnp.where(position < len(prompt_P), prompt_P[jnp.minimum(position, len(prompt_P) - 1)], token_11)
            start_B = jnp.full((1,), position)
            hidden, cache, _ = transformer.extend(
                params, config, token_11, start_B[:, None], cache, kv_cache.attend_at(start_B)
            )
            best = jnp.argmax(transformer.logits(params, config, hidden)[0, 0]).astype(jnp.int32)
            return (jnp.full((1, 1), best), cache), (token_11[0, 0], best, hidden[0, 0])

        # Columns that were never written weigh nothing.
        cache = jax.tree.map(lambda x: x + 3, kv_cache.create(config, 1, T))
        return jax.lax.scan(step, (jnp.zeros((1, 1), jnp.int32), cache), jnp.arange(T))[1]

    tokens_T, best_T, hidden_TD = decode(params, prompt_P)
    np.testing.assert_array_equal([*tokens_T[1:], best_T[-2]], [*prompt_P[1:], *new_N, new_N[-1]])
    hidden_1TD, _ = jax.jit(transformer.apply, static_argnums=1)(params, config, np.asarray(tokens_T)[None])
    # The same sums in another order (latent attention: other products), on states of size 3.
    np.testing.assert_allclose(hidden_TD, hidden_1TD[0], rtol=0, atol=1e-5)


# ---- round trips -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FOLDERS)
def test_save_load_save_gives_the_same_bytes(name, tmp_path):
    """The files twice; and the bytes, names and shapes of the original's tensors, by a reader that knows the format alone."""
    config, params = hf.load(FOLDERS[name])
    hf.save(tmp_path / "a", config, params)
    again = hf.load(tmp_path / "a")
    assert again[0] == config
    jax.tree.map(np.testing.assert_array_equal, again[1], params)
    hf.save(tmp_path / "b", *again)
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    saved, original = (raw_tensors(folder) for folder in (tmp_path / "a", FOLDERS[name]))
    extra = set(original) - set(saved)  # multi-token prediction
    assert all(tensor.startswith(f"model.layers.{config.num_layers}.") for tensor in extra)
    assert saved == {tensor: value for tensor, value in original.items() if tensor not in extra}


@pytest.mark.parametrize("name", FOLDERS)
def test_entries_that_the_model_does_not_contradict_stay(name):
    """Those of transformers 4 and 5; a field that changed is written, whichever of its spellings the source has."""
    config, more = hf.read_config(FOLDERS[name]), {"bos_token_id": 7, "own": {"a": [1]}, "use_cache": True}
    stored = json.loads((FOLDERS[name] / "config.json").read_text()) | more
    dtypes = {key: config.param_dtype for key in ("dtype", "torch_dtype") if key in stored}
    assert hf_config.update(stored, config) == stored | dtypes
    assert hf_config.update({}, config) == hf_config.write(config)
    changes = [
        {"rope_theta": 2 * config.rope_theta},
        {"max_positions": config.max_positions + 8},
        {"param_dtype": "bfloat16"},
    ]
    changes += [{"rope_scaling": "linear", "rope_factor": 4.0}] * (config.rope_scaling == "none")
    for fields in changes:
        changed = dataclasses.replace(config, **fields)
        found = hf_config.update(stored, changed)
        read = hf_config.read(found)
        assert {key: getattr(read, key) for key in fields} == fields and found | more == found
        assert [*hf_config._differences(changed, read)] == []


def raw_tensors(folder):
    """Name -> (dtype, shape, bytes) of every safetensors file in a folder."""
    out = {}
    for path in folder.glob("*.safetensors"):
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        assert header.pop("__metadata__") == {"format": "pt"}
        for tensor, entry in header.items():
            begin, end = entry["data_offsets"]
            assert (8 + length + begin) % {"F32": 4, "BF16": 2}[entry["dtype"]] == 0
            out[tensor] = entry["dtype"], tuple(entry["shape"]), data[8 + length + begin : 8 + length + end]
    return out


@pytest.mark.parametrize("name", ["glm4moe_full", "gpt_oss", "deepseek_v3"])
def test_stacked_layers_load_and_save_as_single_ones_do(name, tmp_path):
    config, params = hf.load(FOLDERS[name])
    scanned, stacked = hf.load(FOLDERS[name], scan_layers=True)
    assert scanned.scan_layers and not config.scan_layers
    jax.tree.map(np.testing.assert_array_equal, stacked, stacking.stack(params, config))
    hf.save(tmp_path / "a", config, params)
    hf.save(tmp_path / "b", scanned, jax.tree.map(np.asarray, stacked))
    assert raw_tensors(tmp_path / "a") == raw_tensors(tmp_path / "b")


@pytest.mark.parametrize("name", cases.slow_but(["glm4moe_full", "gpt_oss"], "gpt_oss"))
def test_tensors_go_straight_to_their_shards(name):
    """Checks that each device has the slice of the whole that its sharding names."""
    config, params = hf.load(FOLDERS[name], dtype="float32")
    mesh = mesh_lib.create({"expert": 2, "fsdp": 4})
    shardings = rules.shardings(transformer.specs(config), mesh)
    _, placed = hf.load(FOLDERS[name], dtype="float32", shardings=shardings)

    def same(whole, split, sharding):
        assert split.sharding == sharding
        for shard in split.addressable_shards:
            np.testing.assert_array_equal(shard.data, np.asarray(whole)[shard.index])

    jax.tree.map(same, params, placed, shardings)
    _, host = hf.load(FOLDERS[name], dtype="float32", on_host=True)
    assert {type(leaf) for leaf in jax.tree.leaves(host)} == {np.ndarray}
    jax.tree.map(np.testing.assert_array_equal, host, params)


def test_several_files_under_an_index(tmp_path, monkeypatch):
    config, params = hf.load(FOLDERS["qwen3moe_mixed"])
    monkeypatch.setattr(checkpoint, "MAX_FILE_BYTES", 40_000)
    hf.save(tmp_path / "a", config, params, stored={"eos_token_id": [2, 3], "auto_map": {"AutoModel": "x.py"}})
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    count = len(files) - 2
    parts = [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
    assert count > 1 and files == ["config.json", *parts, safetensors_file.INDEX]
    index = json.loads((tmp_path / "a" / safetensors_file.INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(len(data) for *_, data in raw_tensors(tmp_path / "a").values())
    assert set(index["weight_map"]) == set(raw_tensors(tmp_path / "a"))
    written = json.loads((tmp_path / "a" / "config.json").read_text())
    assert written["eos_token_id"] == [2, 3] and "auto_map" not in written  # whose files are not there
    jax.tree.map(np.testing.assert_array_equal, hf.load(tmp_path / "a")[1], params)


def test_dtype_converts_parameters_but_not_the_correction():
    config, params = hf.load(FOLDERS["glm4moe_full"], dtype="bfloat16")
    assert config.param_dtype == config.dtype == "bfloat16"
    dtypes = {path[-1]: leaf.dtype for path, leaf in tensor_names.leaves(params).items()}
    assert dtypes.pop("correction") == jnp.float32 and set(dtypes.values()) == {jnp.dtype(jnp.bfloat16)}


def heads_out(matrix):
    return matrix.reshape(6, -1, matrix.shape[1]).transpose(2, 0, 1)


def heads_in(matrix):
    return matrix.reshape(matrix.shape[0], 5, -1).transpose(1, 2, 0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_blocks_are_put_together_as_one_copy_would_be(dtype):
    """Every kind of view that models/hf/tensor_names.py takes, several blocks wide, whole and as one device's part."""
    flat = np.random.default_rng(0).standard_normal(600 * 640).astype(dtype)
    matrix, cube = flat.reshape(600, 640), flat.reshape(4, 300, 320)
    part_of_heads = heads_out(matrix)[300:, 2:5]
    views = [matrix, matrix.T, heads_out(matrix), heads_out(matrix)[..., :70], heads_in(matrix), part_of_heads]
    for n, view in enumerate([*views, cube[..., 0::2], matrix.T[130:611, 7:593]]):
        out = checkpoint._aligned(view.shape, view.dtype)
        checkpoint._transfer(out, view)
        assert out.tobytes() == view.tobytes(), n
        assert out.ctypes.data % 64 == 0
    wide = checkpoint._aligned((640, 600), np.dtype(np.float32))
    checkpoint._transfer(wide, matrix.T)
    np.testing.assert_array_equal(wide, matrix.T.astype(np.float32))


def test_a_large_tensor_is_copied_and_given_back_in_pieces(monkeypatch):
    """Pieces of 40 KB cover the tensor once, for any view; earlier pieces may be gone by then."""
    monkeypatch.setattr(checkpoint, "PIECE_BYTES", 40_000)
    matrix = np.random.default_rng(0).standard_normal((600, 640)).astype(np.float32)
    for view in (matrix, matrix.T, heads_out(matrix), heads_in(matrix), matrix.reshape(4, 150, 640)):
        places, out = [], checkpoint._aligned(view.shape, view.dtype)
        checkpoint._transfer(
            out, view, lambda piece, places=places: places.append(np.lib.array_utils.byte_bounds(piece))
        )
        assert out.tobytes() == view.tobytes()
        base = matrix.ctypes.data
        assert places[0][0] == base and places[-1][1] == base + matrix.nbytes
        assert all(before[1] == after[0] for before, after in zip(places, places[1:], strict=False))
        assert max(high - low for low, high in places) <= 40_000


def test_pages_that_were_given_back_read_the_same_again():
    reader = safetensors_file.Reader(FOLDERS["llama_mha_bias"])
    for name in reader.entries:
        before = np.array(reader.tensor(name))
        reader.forget(name, reader.tensor(name).T)
        np.testing.assert_array_equal(reader.tensor(name), before)


# ---- config.json -----------------------------------------------------------------------------------------------------


def stored(name):
    return json.loads((FOLDERS[name] / "config.json").read_text())


def version_5(old, nested=False):
    """The same config as transformers 5 writes it."""
    new = {key: value for key, value in old.items() if key not in ("rope_theta", "rope_scaling", "torch_dtype")}
    new["dtype"] = old["torch_dtype"]
    rope = {**(old.get("rope_scaling") or {}), "rope_theta": old["rope_theta"]}
    rope["rope_type"] = rope.pop("type", rope.get("rope_type", "default"))
    if "partial_rotary_factor" in new:
        rope["partial_rotary_factor"] = new.pop("partial_rotary_factor")
    for key in ("num_experts", "n_routed_experts"):
        if key in new:
            new["num_local_experts"] = new.pop(key)
    return new | {"rope_parameters": rope}


@pytest.mark.parametrize("name", [name for name in FOLDERS if "torch_dtype" in stored(name)])
def test_both_spellings_read_the_same(name):
    assert hf_config.read(version_5(stored(name))) == hf_config.read(stored(name))


def test_gemma_in_the_spelling_of_version_4():
    old = stored("gemma3_text")
    rope = old.pop("rope_parameters")
    assert rope["full_attention"] == {"factor": 8.0, "rope_theta": 1000000.0, "rope_type": "linear"}
    for key in ("layer_types", "_sliding_window_pattern", "dtype"):
        del old[key]
    old |= {"rope_theta": 1e6, "rope_local_base_freq": 10000.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    old |= {"sliding_window_pattern": 6, "torch_dtype": "float32"}
    config = hf_config.read(old)
    assert config == hf_config.read(stored("gemma3_text")) and config.layer_pattern == "SSSSSF"


def test_what_a_file_leaves_out_is_the_default_of_its_family():
    """Uses the defaults of the config classes of transformers 5."""
    glm, deepseek, oss = (stored(name) for name in ("glm4moe_full", "deepseek_v3", "gpt_oss"))
    named = ("first_k_dense_replace", "routed_scaling_factor", "n_group", "topk_group", "n_shared_experts")
    config = hf_config.read({key: value for key, value in glm.items() if key not in (*named, "head_dim")})
    assert config.head_dim == glm["hidden_size"] // glm["num_attention_heads"]
    assert config.first_dense_layers == config.routed_scale == config.router_groups == config.num_shared_experts == 1
    deepseek |= {"n_routed_experts": 32, "num_experts_per_tok": 8}
    config = hf_config.read({key: value for key, value in deepseek.items() if key not in named})
    assert (config.first_dense_layers, config.routed_scale, config.num_shared_experts) == (3, 2.5, 1)
    assert (config.router_groups, config.router_groups_kept) == (8, 4)
    config = hf_config.read({key: value for key, value in oss.items() if not key.startswith("rope")})
    assert (config.rope_scaling, config.rope_factor, config.rope_theta) == ("yarn", 32.0, 150000.0)
    assert config.rope_original_positions == 4096 and not config.rope_truncate


@pytest.mark.parametrize(
    ("name", "absent", "expected"),
    [
        (
            "gpt_oss",
            "swiglu_limit swiglu_alpha attention_bias head_dim",
            dict(clamp_limit=7.0, clamp_alpha=1.702, qkv_bias=True, out_bias=True, head_dim=64, layer_pattern="SF"),
        ),
        (
            "gemma3_text",
            "head_dim query_pre_attn_scalar tie_word_embeddings rope_parameters layer_types _sliding_window_pattern",
            dict(head_dim=256, attention_scale=1 / 16, tie_embeddings=True, rope_theta=1e6, layer_pattern="SSSSSF")
            | dict(rope_local_theta=10000.0),
        ),
        ("deepseek_v3", "rope_interleave norm_topk_prob", dict(rope_interleaved=True, norm_topk=True)),
        ("glm4moe_full", "norm_topk_prob partial_rotary_factor", dict(norm_topk=True, rope_dim=8)),
        ("qwen3moe_mixed", "decoder_sparse_step norm_topk_prob", dict(mixture_every=1, norm_topk=False)),
        ("qwen3_bias_yarn_v5", "head_dim attention_bias", dict(head_dim=128, qkv_bias=False, out_bias=False)),
    ],
)
def test_other_defaults_are_those_of_the_config_classes(name, absent, expected):
    """Most give parameters of the same shapes, and only wrong numbers."""
    config = hf_config.read({key: value for key, value in stored(name).items() if key not in absent.split()})
    assert {field: getattr(config, field) for field in expected} == expected


def test_entries_of_scaled_positions_have_their_defaults():
    deepseek, gemma, llama = (stored(name) for name in ("deepseek_v3", "gemma3_text", "llama_mha_bias"))
    given = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16, "mscale": 0.7}
    config = hf_config.read(deepseek | {"rope_scaling": given})
    assert (config.rope_beta_fast, config.rope_beta_slow, config.rope_mscale) == (32.0, 1.0, 0.7)
    assert config.rope_truncate
    given = {"rope_type": "yarn", "original_max_position_embeddings": 256}
    assert hf_config.read(llama | {"rope_scaling": given}).rope_factor == 2048 / 256
    nested = {"full_attention": {"rope_type": "default", "rope_theta": 5e5}, "sliding_attention": {}}
    config = hf_config.read(gemma | {"rope_parameters": nested})
    assert (config.rope_theta, config.rope_local_theta) == (5e5, 10000.0)


def test_float16_is_read_as_float32():
    """bfloat16 would lose three bits."""
    config = hf_config.read(stored("llama_mha_bias") | {"torch_dtype": "float16"})
    assert config.param_dtype == config.dtype == "float32"


def test_windows_of_qwen():
    """Unused ones are ignored. In Qwen2 and Qwen3 the layers from `max_window_layers` on slide, in a mixture all layers."""
    sliding, plain = (
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
        stored("qwen2_tied_bf16"),
    )
    assert hf_config.read(plain | {"sliding_window": 32768}) == hf_config.read(plain)
    for family in ("qwen2", "qwen3"):
        dense = plain | {"model_type": family, "num_hidden_layers": 3}
        config = hf_config.read(dense | sliding)
        assert config.window == 8 and [config.is_sliding(n) for n in range(3)] == [False, True, True]
        assert hf_config.read(dense | sliding | {"sliding_window": None}).layer_pattern == "F"
        deep = {key: value for key, value in (dense | sliding).items() if key != "max_window_layers"}
        config = hf_config.read(deep | {"num_hidden_layers": 30})
        assert [n for n in range(30) if config.is_sliding(n)] == [28, 29]
    config = hf_config.read(stored("qwen3moe_mixed") | sliding)
    assert config.window == 8 and all(config.is_sliding(n) for n in range(config.num_layers))
    absent = {key: value for key, value in stored("qwen3moe_mixed").items() if key != "sliding_window"}
    assert hf_config.read(absent | {"use_sliding_window": True}).window == 4096


def test_an_odd_part_of_a_head_rotates_as_the_next_even_one():
    """Half of 10 dims: 3 pairs, at the frequencies of 5 dims, as transformers computes them."""
    config = hf_config.read(stored("glm4moe_full") | {"head_dim": 10, "partial_rotary_factor": 0.5})
    assert config.rope_dim == 5 and hf_config.write(config)["partial_rotary_factor"] == 0.5
    frequency_R, _ = layers.frequencies(config, sliding=False)
    np.testing.assert_allclose(frequency_R, config.rope_theta ** (-np.array([0, 2, 4]) / 5), rtol=1e-6)
    with pytest.raises(ValueError, match="head_dim = 9 must be even"):
        hf_config.read(stored("glm4moe_full") | {"head_dim": 9, "partial_rotary_factor": 1.0})


@pytest.mark.parametrize("name", ["gpt_oss", "gemma3_text"])
def test_a_family_that_slides_can_be_saved_without(name):
    changes = dict(layer_pattern="F", window=0, rope_local_theta=0.0)
    if name == "gpt_oss":
        changes |= dict(rope_scaling="none", rope_factor=1.0)
    config = config_lib.dataclasses.replace(loaded(name)[0], **changes)
    again = hf_config.read(hf_config.write(config))
    assert again.layer_pattern == "F" and again.rope_scaling == config.rope_scaling


def test_biases_of_latent_attention_have_their_names():
    config = hf_config.read(stored("deepseek_v3") | {"attention_bias": True})
    names = {name.removeprefix("model.layers.0.self_attn.") for name in tensor_names.tensors(config) if "bias" in name}
    assert {"q_a_proj.bias", "kv_a_proj_with_mqa.bias", "o_proj.bias"} <= names
    assert hf_config.read(hf_config.write(config)) == config


def test_empty_tensors_of_no_shared_experts_are_no_error():
    config = hf_config.read(stored("glm4moe_full") | {"n_shared_experts": 0})
    shapes = {name: tensor.shape for name, tensor in tensor_names.tensors(config).items()}
    hf.check(config, shapes | {"model.layers.1.mlp.shared_experts.gate_proj.weight": (0, config.model_dim)}, "here")


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 16}


def test_kinds_of_layers_are_as_many_as_layers():
    """Fewer would be repeated, and the last ones of more left out: both another model than transformers builds."""
    plain = stored("qwen2_tied_bf16") | {"use_sliding_window": True, "sliding_window": 8}
    for count in (1, 3):
        with pytest.raises(ValueError, match=f"has {count} entries, but num_hidden_layers is 2"):
            hf_config.read(plain | {"layer_types": ["sliding_attention"] * count})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "mamba"}, ("'mamba'", "not supported", "qwen3_moe")),
        ({"partial_rotary_factor": 0.5}, ("partial_rotary_factor 0.5", "'llama'")),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, ("'dynamic'", "yarn")),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, ("'longrope'", "yarn")),
        ({"hidden_act": "relu"}, ("'relu'", "silu")),
        ({"vocab_size": None}, ("'vocab_size'",)),
        ({"quantization_config": {"quant_method": "fp8"}}, ("fp8", "dequantize")),
        ({"num_key_value_heads": 3}, ("num_heads = 4", "num_kv_heads = 3")),
        ({"num_hidden_layers": 10**9}, ("num_hidden_layers", "above 1024")),
        (
            {"model_type": "qwen3_moe", "num_experts": 10**9, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
            ("num_experts = 1000000000", "at most 65536"),
        ),
        ({"vocab_size": "67"}, ("vocab_size", "'67'", "whole number")),
        ({"num_attention_heads": 4.0}, ("num_attention_heads", "4.0", "whole number")),
        ({"quantization_config": "awq"}, ("awq", "dequantize")),
        ({"rope_scaling": "linear"}, ("'linear'", "not an object")),
        ({"rope_scaling": YARN | {"attention_factor": 0.0}}, ("attention_factor 0",)),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": 8.0}}, ("rope_low_freq = 8.0", "rope_high_freq = 4.0")),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": None}}, ("low_freq_factor",)),
        ({"rms_norm_eps": float("nan")}, ("norm_eps = nan", "finite")),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_a_config_that_has_no_counterpart_is_refused(change, words):
    with pytest.raises(ValueError) as error:
        hf_config.read(stored("llama_mha_bias") | change)
    for word in words:
        assert word in str(error.value)


def test_a_config_that_its_family_cannot_express_is_not_saved(tmp_path):
    config, params = loaded("llama_mha_bias")
    wrong = config_lib.dataclasses.replace(config, qk_norm=True)
    with pytest.raises(ValueError, match=r"'llama' cannot express model.qk_norm = True \(reads as False\)"):
        hf.save(tmp_path / "a", wrong, params)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="no mixtures of experts.*'qwen3', 'glm4_moe'"):
        hf_config.write(config_lib.dataclasses.replace(loaded("qwen3moe_mixed")[0], family="llama"))


# Parameters as counted on the models' own pages, or (GLM, INTELLECT-1) to the digit that their names give.
PUBLISHED = {
    "PrimeIntellect/INTELLECT-1-Instruct": (10.2e9, 0.01),
    "intellect_2": (32_763_876_352, 0),
    "intellect_3": (106e9, 0.01),
    "zai-org/GLM-4.5-Base": (355e9, 0.01),
    "Qwen/Qwen3-0.6B": (596_049_920, 0),
    "Qwen/Qwen3-8B": (8_190_735_360, 0),
    "Qwen/Qwen3-30B-A3B": (30_532_122_624, 0),
    "meta-llama/Llama-3.1-8B-Instruct": (8_030_261_248, 0),
    "Qwen/Qwen2.5-0.5B": (494_032_768, 0),
    "Qwen/Qwen2.5-1.5B": (1_543_714_304, 0),
}


def test_presets_have_the_published_sizes_and_a_config_json():
    for name in presets.MODELS:
        config = tiny.published(name)
        count, tolerance = PUBLISHED.get(name, (transformer.num_params(config), 0))
        assert math.isclose(transformer.num_params(config), count, rel_tol=tolerance), name
        again = hf_config.read(hf_config.write(config), remat="block", scan_layers=True)
        assert hf_config._differences(config, again) == [], name
        few = [dataclasses.replace(one, num_layers=min(one.num_layers, 8)) for one in (config, again)]
        names, same_names = (set(tensor_names.tensors(one)) for one in few)
        assert names == same_names, name


# ---- files that are wrong --------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    shutil.copytree(FOLDERS["llama_mha_bias"], tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def rewrite(folder, change):
    """Passes the tensors through `change(name -> array)` and writes them back, in one file."""
    reader = safetensors_file.Reader(folder)
    tensors = change({name: np.array(reader.tensor(name)) for name in reader.entries})
    (folder / safetensors_file.INDEX).unlink(missing_ok=True)
    lazy = {name: (x.dtype, x.shape, lambda x=x: x) for name, x in tensors.items()}
    safetensors_file.write(folder / "model.safetensors", lazy)


def test_missing_wrong_and_unknown_tensors_are_listed(folder):
    def change(tensors):
        tensors["model.layers.0.self_attn.q_projection.weight"] = tensors.pop("model.layers.0.self_attn.q_proj.weight")
        tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1]
        return tensors

    rewrite(folder, change)
    with pytest.raises(ValueError) as error:
        hf.load(folder)
    name, shape = "model.layers.0.self_attn.q_{}.weight", "[40, 40]"
    nearest = f"(nearest in the file: {name.format('projection')} {shape})"
    assert str(error.value) == (
        f"{folder} does not have the tensors of a llama model with its config: "
        f"1 missing ({name.format('proj')} {shape} {nearest}), 1 of another shape (model.norm.weight [39], should be [40]), "
        f"1 unknown ({name.format('projection')} {shape}); correct the files or the config"
    )


@pytest.mark.parametrize("name", ["glm4moe_full", "llama_mha_bias"])
def test_layers_for_multi_token_prediction_are_skipped(name, tmp_path):
    """In families that have them: elsewhere a layer too many says that num_hidden_layers is wrong."""
    folder = shutil.copytree(FOLDERS[name], tmp_path / "checkpoint")
    L, D = stored(name)["num_hidden_layers"], stored(name)["hidden_size"]

    def change(tensors):
        extra = {name.replace("layers.0", f"layers.{L}"): x for name, x in tensors.items() if ".layers.0." in name}
        extra |= {f"model.layers.{L}.eh_proj.weight": np.zeros((D, 2 * D), np.float32)}
        return tensors | extra | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(5, np.float32)}

    rewrite(folder, change)
    if name == "glm4moe_full":
        jax.tree.map(np.testing.assert_array_equal, hf.load(folder)[1], hf.load(FOLDERS[name])[1])
    else:
        with pytest.raises(ValueError, match=rf"\d+ unknown \(model.layers.{L}"):
            hf.load(folder)


def test_a_head_that_contradicts_its_tie_is_refused(tmp_path, capsys, monkeypatch):
    """transformers 5 then uses both, in spite of config.json; 4 used the embeddings for both. Also in the last row alone."""
    monkeypatch.setattr(tensor_check, "PIECE_BYTES", 1000)  # so that it is compared in several pieces
    folder = shutil.copytree(FOLDERS["qwen2_tied_bf16"], tmp_path / "checkpoint")
    embedding = np.array(safetensors_file.Reader(folder).tensor("model.embed_tokens.weight"))
    assert embedding.nbytes > 2 * tensor_check.PIECE_BYTES
    rewrite(folder, lambda tensors: tensors | {"lm_head.weight": embedding.astype(np.float32)})
    hf.load(folder)  # the same numbers in another dtype: how they were tied
    other_last = np.concatenate([embedding[:-1], embedding[-1:] + 1])
    for head in (other_last, embedding[::-1]):
        rewrite(folder, lambda tensors, head=head: tensors | {"lm_head.weight": head})
        with pytest.raises(ValueError, match="set tie_word_embeddings to false"):
            hf.load(folder)
    assert commands.run("models.hf", "inspect", str(folder)) == 1 and "tie_word_embeddings" in capsys.readouterr().err


def test_a_few_names_stand_for_hundreds_of_tensors_in_an_error():
    """It is one line."""
    config = loaded("qwen3moe_mixed")[0]
    with pytest.raises(
        ValueError, match=r"nowhere does not have .*: \d+ missing \(.*; and \d+ more\); correct"
    ) as error:
        hf.check(config, {}, "nowhere")
    assert "\n" not in str(error.value) and str(error.value).count(".weight [") == tensor_check.LISTED


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda data: data[:-1], ("model.safetensors", "truncated")),
        (lambda data: data[:4], ("not a safetensors file",)),
        (lambda data: b"\xff" * 8 + data[8:], ("not a safetensors file", "header")),
        (lambda data: data[:8] + b"[" + data[9:], ("not a safetensors file", "JSON")),
        (lambda data: data.replace(b'"F32"', b'"F31"', 1), ("F31",)),
        (lambda data: data.replace(b'"shape":[', b'"shape":[-', 1), ("header is wrong",)),
        (lambda data: re.sub(rb'"shape":\[\d\d,\d\d\]', b'"shape":[1e999]', data, count=1), ("malformed",)),
        (lambda data: data.replace(b'"F32"', b"[   ]", 1), ("dtype [], not one of",)),
        (lambda data: (10**5).to_bytes(8, "little") + b"[" * 10**5, ("not a safetensors file",)),
        (lambda data: data.replace(b'"F32"', b'"I32"', 1), ("int32", "quantized")),
    ],
    ids=[
        "truncated",
        "stub",
        "huge_header",
        "not_json",
        "unknown_dtype",
        "negative_shape",
        "infinite_shape",
        "listed_dtype",
        "nested",
        "integers",
    ],
)
def test_damaged_files_are_refused(folder, damage, words, capsys):
    path = folder / "model.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError) as error:
        hf.load(folder)
    assert commands.run("models.hf", "inspect", str(folder)) == 1
    printed = capsys.readouterr().err
    for word in words:
        assert word in str(error.value) and word in printed


def test_an_index_may_not_point_out_of_its_folder(folder):
    cases = [("../model.safetensors", "not a file of that folder"), ("b.safetensors", "b.safetensors, which does not")]
    cases = [(json.dumps({"weight_map": {"model.norm.weight": file}}), words) for file, words in cases]
    bad = (
        "{",
        "[]",
        "{}",
        '{"weight_map": []}',
        '{"weight_map": {"a": ["b"]}}',
        '{"weight_map": {"a": 5}}',
        "[" * 10**5,
    )
    for text, words in [*cases, *((text, "not an index with a weight_map") for text in bad)]:
        (folder / safetensors_file.INDEX).write_text(text)
        with pytest.raises(ValueError, match=words):
            hf.load(folder)
    for file in ("model.safetensors", "other.safetensors"):  # one of the two is stale
        shutil.copy(folder / "model.safetensors", folder / "other.safetensors")
        (folder / safetensors_file.INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": file}}))
        if file == "model.safetensors":
            assert safetensors_file._paths(folder) == [folder / file]
            continue
        with pytest.raises(
            ValueError, match="has model.safetensors, and .*index.json names other files; delete the stale"
        ):
            hf.load(folder)
    good = (folder / "config.json").read_text()
    for text, words in (
        ("[]", "config.json contains a list, not a dict"),
        ("[" * 10**5, "config.json: maximum recursion depth exceeded"),
        (good.replace('"rms_norm_eps": ', '"rms_norm_eps": [], "_": '), "config.json .* has one of another type"),
    ):
        (folder / "config.json").write_text(text)
        with pytest.raises(ValueError, match=words):
            hf.load(folder)


def test_a_hub_id_is_fetched(monkeypatch, tmp_path):
    """A config, a tokenizer, and the weights are downloaded when they are needed. The commit is recorded and can be requested."""
    asked, commit = [], "c" * 40
    (tmp_path / "snapshots").mkdir()
    (tmp_path / "snapshots" / commit).symlink_to(FOLDERS["qwen2_tied_bf16"])

    def download(repo, revision, allow_patterns):
        asked.append((repo, revision, allow_patterns))
        return str(tmp_path / "snapshots" / commit)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.setattr(hub, "_COMMITS", {})
    assert hf.read_config("Owner/Name") == hf.read_config(FOLDERS["qwen2_tied_bf16"])
    with pytest.raises(FileNotFoundError, match="lacks tokenizer.json"):  # the fixture has none
        tokenizer_lib.load("Owner/Name@main")
    for_config, for_tokenizer = asked
    assert for_config[:2] == ("Owner/Name", None) and list(for_config[2]) == ["config.json"]
    assert for_tokenizer[:2] == ("Owner/Name", "main") and "*.safetensors" not in for_tokenizer[2]
    hf.load("Owner/Name", on_host=True)
    assert "*.safetensors" in asked[-1][2]
    assert hub.commits() == {"Owner/Name": commit, "Owner/Name@main": commit}
    assert hub.pinned("Owner/Name") == hub.pinned("Owner/Name@main") == f"Owner/Name@{commit}"
    assert hub.pinned("byte_chatml") == "byte_chatml"
    with pytest.raises(ValueError, match="not a folder"):
        hf.read_config("./Owner/Name")


def test_what_is_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(ValueError, match="not a folder"):
        hf.load(tmp_path / "nothing")
    with pytest.raises(ValueError, match="config.json does not exist"):
        hf.load(tmp_path)
    (tmp_path / "config.json").write_text((FOLDERS["gpt_oss"] / "config.json").read_text())
    with pytest.raises(ValueError, match=r"no weights in .*\. Download the checkpoint again"):
        hf.load(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"no weights in .*\. pytorch_model.bin may run code: save it as safetensors"):
        hf.load(tmp_path)
    for name in "ab":
        (tmp_path / f"{name}.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="2 .safetensors files but no model.safetensors.index.json"):
        hf.load(tmp_path)
    config, params = loaded("gpt_oss")
    with pytest.raises(ValueError, match="not an empty folder"):
        hf.save(tmp_path, config, params)


# ---- the command -----------------------------------------------------------------------------------------------------


def test_the_command(tmp_path, capsys):
    source, out = str(shutil.copytree(FOLDERS["qwen2_tied_bf16"], tmp_path / "source")), str(tmp_path / "out")
    (tmp_path / "source" / "tokenizer.json").write_text("{}")
    assert commands.run("models.hf", "inspect", source) == 0
    assert "43,544" in capsys.readouterr().out  # parameters, from meta.json
    assert commands.run("models.hf", "convert", source, out, "--dtype", "float32") == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == 2
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert commands.run("models.hf", "compare", source, out) == 0
    assert "26 of 26 parameters are equal" in capsys.readouterr().out
    rewrite(tmp_path / "out", lambda tensors: tensors | {"model.norm.weight": tensors["model.norm.weight"] + 1})
    assert commands.run("models.hf", "compare", source, out) == 1 and "final_norm" in capsys.readouterr().out
    assert commands.run("models.hf", "convert", source, out) == 1 and "not an empty folder" in capsys.readouterr().err

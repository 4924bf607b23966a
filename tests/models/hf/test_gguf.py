"""GGUF files, written here by the `gguf` package, against its own dequantization and the Hugging Face folder of the same model.

The writer's side of llama.cpp's changes (the order of the rows of q and k, 1 added to Gemma's norms, Llama 3's rotary factors) is
transcribed from its convert_hf_to_gguf.py.
"""

import functools
import os
import pathlib
import re
import shutil
import struct
import time

import gguf
import jax
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, pre_tokenizers, trainers
from tokenizers import models as tokenizer_models

from models import hf, hub, transformer
from models.hf import config as hf_config
from models.hf import gguf_file, safetensors_file, tensor_names
from models.text import gguf_tokenizer
from models.text import tokenizer as tokenizer_lib
from sharding.mesh import host_memory, rules
from sharding.mesh import mesh as mesh_lib
from sharding.weights.format import gguf_header
from tests.support import commands, tiny

pytestmark = pytest.mark.usefixtures("compile_fast")
KINDS = list(gguf_file._readable().values())
COMMON = dict(
    vocab_size=96, hidden_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=64
)
COMMON |= dict(intermediate_size=256, max_position_embeddings=512, rms_norm_eps=1e-6, rope_theta=5e4)
LLAMA3 = dict(
    low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192, factor=8.0, rope_type="llama3"
)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=128)
CASES = {
    "llama": dict(model_type="llama", tie_word_embeddings=True),
    "llama3": dict(model_type="llama", rope_scaling=LLAMA3, attention_bias=True, rope_theta=5e5),
    "qwen2": dict(model_type="qwen2", rope_scaling=YARN),
    "qwen3": dict(model_type="qwen3", tie_word_embeddings=True),
    "qwen3moe": dict(
        model_type="qwen3_moe", num_experts=3, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True
    ),
    "gemma3": dict(model_type="gemma3_text", sliding_window=8, query_pre_attn_scalar=64, num_hidden_layers=7)
    | dict(hidden_activation="gelu_pytorch_tanh", rope_scaling=dict(rope_type="linear", factor=8.0)),
}
ARCHS = {"llama3": "llama"}


def write_folder(path, case):
    config = hf_config.read(COMMON | CASES[case] | {"dtype": "float32"})
    hf.save(path, config, tiny.params(config, 0))  # no parameter of 0 or 1, so that none can be forgotten
    return config


def permute(weights, heads):
    return (
        weights.reshape(heads, 2, len(weights) // heads // 2, *weights.shape[1:]).swapaxes(1, 2).reshape(weights.shape)
    )


def as_llama_cpp(folder, config, case):
    """Returns {name in a GGUF file: array} of a folder's tensors."""
    arch = ARCHS.get(case, case)
    code = next(code for code, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names, reader, found, experts = (
        gguf.get_tensor_name_map(code, config.num_layers),
        safetensors_file.Reader(folder),
        {},
        {},
    )
    for name in reader.entries:
        array = np.array(reader.tensor(name), np.float32)
        if arch == "llama" and re.search(r"[qk]_proj", name):
            array = permute(array, config.num_heads if "q_proj" in name else config.num_kv_heads)
        if arch == "gemma3" and name.endswith("norm.weight"):
            array = array + 1
        if number := re.search(r"experts\.(\d+)\.", name):
            stored = names.get_name(name.replace(number[0], "experts."), (".weight",))
            experts.setdefault(stored, {})[int(number[1])] = array
        else:
            found[names.get_name(name, (".weight", ".bias"))] = array
    found |= {name: np.stack([parts[n] for n in sorted(parts)]) for name, parts in experts.items()}
    if case == "llama3":
        waves = [2 * np.pi * 5e5 ** (n / 64) for n in range(0, 64, 2)]
        smooth = [(8192 / wave - 1) / (4 - 1) for wave in waves]
        blends = [
            1 if w < 8192 / 4 else 8 if w > 8192 else 1 / ((1 - s) / 8 + s) for w, s in zip(waves, smooth, strict=True)
        ]
        found["rope_freqs.weight"] = np.array(blends, np.float32)
    return found


def metadata(writer, case):
    entries = COMMON | CASES[case]
    writer.add_context_length(512)
    writer.add_embedding_length(256)
    writer.add_block_count(entries["num_hidden_layers"])
    writer.add_feed_forward_length(256)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(entries["rope_theta"])
    writer.add_key_length(64)
    writer.add_value_length(64)
    writer.add_rope_dimension_count(64)
    if case == "qwen2":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(128)
    if case == "gemma3":
        writer.add_sliding_window(8)
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(8.0)
    if case == "qwen3moe":
        writer.add_expert_count(3)
        writer.add_expert_used_count(2)
        writer.add_expert_feed_forward_length(entries["moe_intermediate_size"])


def write_gguf(path, case, tensors, more=lambda writer: None):
    """Writes a GGUF file; `tensors` maps names to an array, or to (bytes of blocks, type)."""
    writer = gguf.GGUFWriter(path, ARCHS.get(case, case))
    metadata(writer, case)
    more(writer)
    for name, tensor in tensors.items():
        if isinstance(tensor, tuple):
            writer.add_tensor(name, tensor[0], raw_dtype=tensor[1])
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@functools.cache
def shared_file(folder):
    """A GGUF file of the case "llama", in a folder that all tests share."""
    config = write_folder(folder / "folder", "llama")
    return write_gguf(folder / "tiny.gguf", "llama", as_llama_cpp(folder / "folder", config, "llama"), vocabulary)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return shared_file(tmp_path_factory.mktemp("gguf"))


@pytest.mark.parametrize("case", CASES)
def test_a_file_is_the_folder_that_it_was_made_from(tmp_path, case):
    config = write_folder(tmp_path / "folder", case)
    path = write_gguf(tmp_path / "model.gguf", case, as_llama_cpp(tmp_path / "folder", config, case))
    (mine, params), (theirs, expected) = hf.load(path), hf.load(tmp_path / "folder")
    assert mine == theirs
    atol = 2**-22 if case == "gemma3" else 0  # 1 added and subtracted again rounds numbers near 1
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=0, atol=atol), params, expected)


@functools.cache
def program(config):
    @jax.jit
    def run(params):
        return transformer.logits(params, config, transformer.apply(params, config, np.arange(32).reshape(2, 16))[0])

    return run


def logits(path):
    config, params = hf.load(path, dtype="float32")
    return np.asarray(program(config)(params))


def blocks(kind, shape, rng):
    """Random blocks of a type, all of whose numbers are finite and below 100 in size."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    rows = rng.integers(0, 256, (int(np.prod(shape)) // block, size), np.uint8)
    bad = np.arange(len(rows))
    while len(bad):
        with np.errstate(all="ignore"):
            largest = np.abs(gguf.dequantize(rows[bad], kind)).max(axis=1)
        bad = bad[~(largest < 100)]
        rows[bad] = rng.integers(0, 256, (len(bad), size), np.uint8)
    return rows.reshape(*shape[:-1], -1)


@pytest.mark.parametrize("name", KINDS)
def test_each_type_gives_the_logits_of_the_packages_own_dequantization(tmp_path, name):
    kind, rng = gguf.GGMLQuantizationType[name], np.random.default_rng(0)
    config = write_folder(tmp_path / "folder", "llama")
    arrays = as_llama_cpp(tmp_path / "folder", config, "llama")
    stored = {n: (blocks(kind, x.shape, rng), kind) if x.ndim == 2 else x for n, x in arrays.items()}
    stored = {n: (x[0].view(np.uint8), kind) if isinstance(x, tuple) else x for n, x in stored.items()}
    path = write_gguf(tmp_path / "model.gguf", "llama", stored)
    read = {
        x.name: gguf.dequantize(x.data, x.tensor_type).reshape(x.shape[::-1]) for x in gguf.GGUFReader(path).tensors
    }
    assert read.keys() == arrays.keys()

    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_layers)
    tensors = {}
    for theirs, tensor in tensor_names.tensors(config).items():
        array = read[names.get_name(theirs, (".weight",))]
        if found := re.search(r"([qk])_proj", theirs):  # the row of pair n, part p of a head is at n + p * 32
            pairs, heads = array.reshape(-1, 32, 2, 256), 4 if found[1] == "q" else 2
            array = np.concatenate([np.concatenate([pairs[h, :, 0], pairs[h, :, 1]]) for h in range(heads)])
        tensors[theirs] = (np.dtype(np.float32), tensor.shape, lambda array=array: array)
    safetensors_file.write(tmp_path / "folder" / "model.safetensors", tensors)
    np.testing.assert_array_equal(logits(path), logits(tmp_path / "folder"))
    assert hf.read_config(path).dtype == ("float32" if name in ("F32", "F16") else "bfloat16")


# ---- tokenizers ------------------------------------------------------------------------------------------------------

TEXTS = [
    "",
    "Hello  world, it's 12 345 o'clock\r\n\n  x",
    "don't DON'T 1234567",
    "naïve 漢字 🙂 e\u0301",
    "\t a\n\n7",
    "<|user|>HelloWorld",
]
TEMPLATE = "{% for m in messages %}<|user|>{{ m.content }}<|end|>{% endfor %}"


@functools.cache
def trained(rule):
    """A byte-level BPE in the form of a Hugging Face checkpoint, trained on this file, with two control tokens and one that is text."""
    patterns = {  # those of the tokenizer.json of SmolLM2, Llama 3, and Qwen 2.5
        "smollm": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
        "llama-bpe": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    }
    steps = patterns[rule]
    if isinstance(steps, str):
        split = pre_tokenizers.Split(tokenizers.Regex(steps), "isolated")
        steps = [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    model = tokenizers.Tokenizer(tokenizer_models.BPE())
    model.pre_tokenizer, model.decoder = pre_tokenizers.Sequence(steps), decoders.ByteLevel()
    if rule == "qwen2":
        model.normalizer = tokenizers.normalizers.NFC()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    model.train_from_iterator(
        [pathlib.Path(__file__).read_text(), *TEXTS], trainers.BpeTrainer(vocab_size=800, initial_alphabet=alphabet)
    )
    model.add_special_tokens(["<|user|>", "<|end|>"])
    model.add_tokens([tokenizers.AddedToken("<think>", normalized=False)])
    return model


def vocabulary(writer, rule="smollm", **changes):
    model = trained(rule)
    by_id = {id: token for token, id in model.get_vocab().items()}
    ids = range(len(by_id))
    merges = tokenizer_lib.json.loads(model.to_str())["model"]["merges"]
    special = {model.token_to_id(name): kind for name, kind in (("<|user|>", 3), ("<|end|>", 3), ("<think>", 4))}
    entries = {"model": "gpt2", "pre": rule, "tokens": [by_id[id] for id in ids]}
    entries |= {"token_type": [special.get(id, 1) for id in ids], "merges": [" ".join(pair) for pair in merges]}
    entries |= {"bos_token_id": model.token_to_id("<|user|>"), "eos_token_id": model.token_to_id("<|end|>")}
    for name, value in (entries | {"add_bos_token": True} | changes).items():
        add = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, list: writer.add_array}
        if value is not None:
            add[type(value)](f"tokenizer.ggml.{name}", value)
    writer.add_chat_template(TEMPLATE)


@pytest.mark.parametrize("rule", ["smollm", "llama-bpe", "qwen2"])
def test_the_tokenizer_is_the_checkpoints(tmp_path, rule):
    path = write_gguf(tmp_path / "t.gguf", "llama", {}, functools.partial(vocabulary, rule=rule))
    found, model = tokenizer_lib.load(path), trained(rule)
    user, end = (model.token_to_id(name) for name in ("<|user|>", "<|end|>"))
    model.encode_special_tokens = True
    for text in TEXTS:
        assert found.encode(text) == model.encode(text).ids, text
        if "<|user|>" not in text:  # a special token in a text prompt is itself
            assert found.prompt_ids(text) == [user, *model.encode(text).ids]
    assert found.encode("<think>") == [model.token_to_id("<think>")]
    assert (found.eos_id, found.stop_ids, found.named["bos_token"]) == (end, (end,), "<|user|>")
    rendered = found.render([{"role": "user", "content": "Hello<|end|>"}]).token_ids
    assert rendered == [user, *found.encode("Hello<|end|>"), end]
    found.save(tmp_path / "folder")  # as `models.hf convert` and rl.export do
    again = tokenizer_lib.load(tmp_path / "folder")
    assert [again.prompt_ids(text) for text in TEXTS] == [found.prompt_ids(text) for text in TEXTS]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "llama"}, "tokenizer.ggml.model 'llama' is not supported, only 'gpt2'"),
        ({"pre": "new-bpe"}, "tokenizer.ggml.pre 'new-bpe' is not supported, only gpt-2, smollm"),
        ({"pre": ["smollm"]}, "tokenizer.ggml.pre ['smollm'] is not supported"),
        ({"tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"merges": None}, "tokenizer.ggml.merges is missing"),
        ({"merges": ["a b c"]}, "merges joins 'a' and 'b c'"),
        ({"eos_token_id": None}, "eos_token_id is missing"),
        ({"bos_token_id": 99999}, "bos_token_id 99999 is not one of"),
        ({"tokens": ["a", "a"], "bos_token_id": 0, "eos_token_id": 0}, "only 1 of 2 differ"),
        ({"tokens": ["$B", "a"], "bos_token_id": 0, "eos_token_id": 1}, "has '$B', but a token that begins"),  # a panic
    ],
)
def test_an_unusable_vocabulary_is_refused_in_one_line(tmp_path, changes, message):
    path = write_gguf(tmp_path / "t.gguf", "llama", {}, functools.partial(vocabulary, **changes))
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        tokenizer_lib.load(path)
    assert "\n" not in str(error.value) and str(path) in str(error.value)


# ---- files that cannot be read ---------------------------------------------------------------------------------------

U32, U64 = functools.partial(struct.pack, "<I"), functools.partial(struct.pack, "<Q")
TEXT = U64(1) + b"a"


def head(tensors=0, entries=0, version=3):
    return b"GGUF" + U32(version) + U64(tensors) + U64(entries)


def tensor(name, *dims, kind=0, offset=0):
    return U64(len(name)) + name.encode() + U32(len(dims)) + b"".join(map(U64, dims)) + U32(kind) + U64(offset)


ARCH = U64(20) + b"general.architecture" + U32(8) + U64(5) + b"llama"
BAD = {
    "is not a GGUF file: it has 3 bytes": b"GGU",
    "begins with b'PK": b"PK\x03\x04" + bytes(40),
    "version 50331648 (of the other byte order)": b"GGUF" + struct.pack(">I", 3) + bytes(40),
    "version 1 is not one of": head(version=1),
    f"{2**60} tensors are more than": head(tensors=2**60),
    "metadata entries are more than": head(entries=2**60),
    "a string of 4611686018427387904 bytes": head(entries=1) + U64(2**62),
    "is longer than": head(entries=1) + U64(2**30),
    "and the file has 0: it is truncated": head(entries=1) + U64(2**20),
    "value of unknown type 99": head(entries=1) + TEXT + U32(99) + bytes(9),
    "is an array of type 9, neither": head(entries=1) + TEXT + U32(9) + U32(9) + U64(2**60) + bytes(99),
    "needs 9223372036854775808 bytes": head(entries=1) + TEXT + U32(9) + U32(10) + U64(2**60) + bytes(99),
    "strings: more than": head(entries=1) + TEXT + U32(9) + U32(8) + U64(2**60) + bytes(99),
    "has 'a' twice": head(entries=2) + (TEXT + U32(0) + b"\x01") * 2,
    "is not UTF-8": head(entries=1) + U64(1) + b"\xff" + bytes(20),
    "has 9 dims": head(tensors=1) + tensor("x", *[2] * 9),
    "has shape [0]": head(tensors=1) + tensor("x", 0),
    "'x' is listed twice": head(tensors=2) + tensor("x", 2) * 2,
    "general.alignment 0": head(entries=1) + U64(17) + b"general.alignment" + U32(4) + U32(0),
    "general.architecture None is not supported; use a model of llama, qwen2": head(),
    "general.architecture 'mamba' is not supported": head(entries=1) + ARCH.replace(b"llama", b"mamba"),
    "config.json has no entry 'hidden_size'": head(entries=1) + ARCH,
}


@pytest.mark.parametrize("message", BAD)
def test_a_malformed_header_is_refused_in_one_line_and_at_once(tmp_path, message):
    (path := tmp_path / "bad.gguf").write_bytes(BAD[message])
    start = time.process_time()
    for read in (
        (hf.load, tokenizer_lib.load) if "general.arch" not in message and "no entry" not in message else (hf.load,)
    ):
        with pytest.raises(ValueError, match=re.escape(message)) as error:
            read(path)
        assert "\n" not in str(error.value) and "bad.gguf" in str(error.value)
    assert time.process_time() - start < 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(kind=9), "tensor blk.0.attn_q.weight has type Q8_1, not one of"),
        (dict(kind=77), "has type 77, not one of"),
        (dict(kind=12, shape=(255, 256)), "are not multiples of Q4_K's blocks of 256"),
        (dict(shape=(256, 512)), "tensors blk.0.attn_q.weight and"),
        (dict(offset=2**40), "tensor blk.0.attn_q.weight ends at byte"),
        (dict(name="blk.0.attn_x.weight"), "1 missing (model.layers.0.self_attn.q_proj.weight [256, 256]"),
        (dict(shape=(128, 512)), "1 of another shape (model.layers.0.self_attn.q_proj.weight [512, 128], should be"),
    ],
)
def test_a_wrong_tensor_is_refused_in_one_line(file, tmp_path, change, message):
    old = gguf_header.read(file).tensors[name := "blk.0.attn_q.weight"]
    relative = old.offset - min(x.offset for x in gguf_header.read(file).tensors.values())
    entry = tensor(name, 256, 256, kind=0, offset=relative)
    new = tensor(
        change.get("name", name),
        *change.get("shape", (256, 256)),
        kind=change.get("kind", 0),
        offset=change.get("offset", relative),
    )
    data = file.read_bytes()
    assert data.count(entry) == 1 and len(new) == len(entry)
    (path := tmp_path / "wrong.gguf").write_bytes(data.replace(entry, new))
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        hf.load(path)
    assert "\n" not in str(error.value)


def test_a_truncated_or_altered_file_is_refused_or_loads(file, tmp_path):
    """Catches: any other exception, and memory or time for sizes that only the header states."""
    data, rng, path = file.read_bytes(), np.random.default_rng(0), tmp_path / "cut.gguf"
    start = min(entry.offset for entry in gguf_header.read(file).tensors.values())
    for size in [*rng.integers(0, start, 60), *rng.integers(start, len(data), 10)]:
        path.write_bytes(data[:size])
        with pytest.raises(ValueError):
            hf.load(path, on_host=True)
    refused = 0
    for _ in range(150):
        altered = np.frombuffer(data[: start + 64], np.uint8).copy()
        altered[rng.integers(0, 2500, 3)] = rng.integers(0, 256, 3)
        path.write_bytes(altered.tobytes() + data[start + 64 :])
        try:
            hf.read_config(path)
            tokenizer_lib.load(path)
            hf.load(path, on_host=True)
        except ValueError as error:
            refused += "\n" not in str(error)
    assert refused > 20


def test_a_file_that_is_cut_while_it_is_read_is_named(file, tmp_path, monkeypatch):
    """A process that reads a mapped file after its end is killed."""
    path, tensor = shutil.copy(file, tmp_path / "cut.gguf"), gguf_file.Reader.tensor

    def cut(*args):
        os.truncate(path, os.path.getsize(path) - 4096)
        return tensor(*args)

    monkeypatch.setattr(gguf_file.Reader, "tensor", cut)
    with pytest.raises(ValueError, match="cut.gguf became shorter while it was read. Read it again"):
        hf.load(path, on_host=True)


def test_pipes_and_absent_files_are_refused_and_nothing_waits(tmp_path):
    os.mkfifo(tmp_path / "pipe.gguf")
    for name, message in (("pipe", "is not a regular file"), ("absent", "No such file or directory; give a GGUF file")):
        with pytest.raises(ValueError, match=message):
            hf.load(tmp_path / f"{name}.gguf")
    # Attack: a file of many gigabytes, most of them an array in its header.
    (sparse := tmp_path / "sparse.gguf").write_bytes(head(entries=1) + TEXT + U32(9) + U32(0) + U64(2**31))
    os.truncate(sparse, 2**32)
    with pytest.raises(ValueError, match="its header is longer than"):
        hf.load(sparse)
    (tmp_path / "folder.gguf").mkdir()
    assert hub.folder(tmp_path / "folder.gguf").is_dir() and gguf_tokenizer.SPLITS


@pytest.mark.parametrize("place", ["host", "device", "mesh"])
def test_a_model_that_does_not_fit_is_refused_before_it_is_loaded(file, monkeypatch, place):
    """Float32 takes 4 bytes: of the 0.95 M parameters, 0.25 M fit 1,000,000 bytes, also on 8 devices that share them."""
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 1_000_000)
    monkeypatch.setattr(gguf_file.Reader, "tensor", None)
    shardings = None
    if place == "mesh":
        config = hf.read_config(file)
        shardings = rules.shardings(transformer.specs(config), mesh_lib.create({"fsdp": 8}, jax.devices()))
    with pytest.raises(
        ValueError, match=r"B parameters, .* GB in float32, and .* 0.001 GB free; use a model of at most 0.00025 B"
    ):
        hf.load(file, on_host=place == "host", shardings=shardings)


def test_inspect_and_convert_take_a_file(file, tmp_path, capsys):
    assert commands.run("models.hf", "inspect", file) == 0
    shown = capsys.readouterr().out
    assert " F32" in shown and "all tensors are present" in shown
    assert commands.run("models.hf", "convert", file, tmp_path / "out", "--dtype", "bfloat16") == 0
    (mine, params), (_, expected) = hf.load(tmp_path / "out"), hf.load(file, dtype="bfloat16")
    assert mine.param_dtype == "bfloat16"
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    assert tokenizer_lib.load(tmp_path / "out").encode(TEXTS[1]) == tokenizer_lib.load(file).encode(TEXTS[1])

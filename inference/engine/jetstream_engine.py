"""The contract of JetStream 0.2.2 for our engine: `JetStreamEngine`, which a stock JetStream Driver runs.

0.2.2 is the last release (2024-05) and was never updated. Importing this file instead of `jetstream` solves three of its problems on
today's JAX, without side effects:
1. `orchestrator.delete_pytree` calls `jax.tree_map`, removed in JAX 0.6; without it the first decode kills the process.
2. `token_utils` imports two class names from seqio, whose real package imports TensorFlow (6-11 s). The names are put
   into `sys.modules` first, with or without an installed seqio.
3. `orchestrator` sets the root logger to DEBUG and adds a handler on stdout: two lines per decode step. Undone here.

Our own server does not use this file: its scheduler takes the place of the Driver (docs/decisions/inference.md).
"""

import logging
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np

from inference.engine import decode_state as state_lib
from inference.engine import engine as engine_lib
from inference.engine import request as request_lib
from models import transformer
from models.text import tokenizer as tokenizer_lib

if not hasattr(jax, "tree_map"):
    jax.__dict__["tree_map"] = jax.tree_util.tree_map

if "seqio" not in sys.modules:
    sys.modules["seqio"] = sys.modules["seqio.vocabularies"] = types.ModuleType("seqio")
    vars(sys.modules["seqio"]).update(Vocabulary=object, SentencePieceVocabulary=object)

_root = logging.getLogger()
_level, _handlers = _root.level, list(_root.handlers)

from jetstream.engine import engine_api, token_utils, tokenizer_api, tokenizer_pb2  # noqa: E402

_root.setLevel(_level)
_root.handlers[:] = _handlers

Prefix = tuple[state_lib.Prefix, state_lib.Request]


class JetStreamEngine(engine_api.Engine):
    """An engine and its weights under JetStream's contract. Prompts are sampled at temperature 1 and seed 0 until a stop ID."""

    samples_per_slot = property(lambda self: 1)
    colocated_cpus = property(lambda self: None)

    def __init__(self, engine: engine_lib.Engine, params: transformer.Params):
        """`params` are the weights that `load_params` returns. Raises ValueError if slots share pages: a Driver keeps no table of them."""
        if engine.config.num_pages:
            found = f"inference.num_pages = {engine.config.num_pages}, and a JetStream Driver keeps no table of pages"
            raise ValueError(f"{found}; set it to 0")
        self._engine, self._params = engine, params

    def load_params(self, *args, **kwargs) -> transformer.Params:
        """Returns the weights given to the constructor."""
        return self._params

    def init_decode_state(self, *args, **kwargs) -> engine_lib.State:
        """Returns the state of all slots, with none in use."""
        return self._engine.init_decode_state()

    def prefill(self, *, params, existing_prefix=None, padded_tokens, true_length) -> Prefix:
        """Prefills one prompt. `existing_prefix` must be None."""
        if existing_prefix is not None:
            found = "existing_prefix is set, but prefill after an existing prefix is not supported"
            raise NotImplementedError(f"{found}; pass None")
        max_len = self._engine.config.max_model_len
        stop_ids = tuple(self._engine.tokenizer.stop_ids)
        request = request_lib.GenerateRequest((), max_tokens=max_len, stop_ids=stop_ids)
        tokens_1T = jnp.asarray(padded_tokens, jnp.int32)[None, :max_len]
        prefix = self._engine.prefill_batch(params, tokens_1T, jnp.asarray([true_length], jnp.int32))
        return prefix, state_lib.request_arrays([request], 1)

    def insert(self, prefix: Prefix, decode_state: engine_lib.State, slot: int) -> engine_lib.State:
        """Copies the prompt that `prefill` returned into a slot; returns the new state, in which the slot decodes."""
        prompt, request = prefix
        rows, slots = np.zeros((1,), np.int32), np.array([slot], np.int32)
        return self._engine.insert_batch(prompt, rows, decode_state, slots, request)

    def generate(self, params, decode_state) -> tuple[engine_lib.State, engine_api.ResultTokens]:
        """Starts one decode call for all slots; returns (new state, result): K tokens, K times validity, and the length of each slot."""
        state, result = self._engine.generate(params, decode_state)
        lengths_B1 = jnp.concatenate([part.generated for part in state])[:, None]
        data, K = jnp.concatenate([result.tokens, result.valid, lengths_B1], axis=1), result.tokens.shape[1]
        return state, engine_api.ResultTokens(data, (0, K), (K, 2 * K), (2 * K, 2 * K + 1), 1)

    def get_prefix_destination_sharding(self) -> None:
        """Returns None: a prefix stays on the devices where `prefill` put it."""
        return None

    def get_tokenizer(self):
        """Returns placeholder tokenizer parameters, which `build_tokenizer` ignores."""
        return tokenizer_pb2.TokenizerParameters(path="")  # pyright: ignore[reportAttributeAccessIssue]  # generated code

    def build_tokenizer(self, metadata) -> tokenizer_api.Tokenizer:
        """Returns the model's tokenizer with JetStream's interface; ignores `metadata`."""
        del metadata
        return _JetStreamTokenizer(self._engine.tokenizer)

    @property
    def max_concurrent_decodes(self) -> int:
        """The number of slots, that is, of sequences decoded at the same time."""
        return self._engine.config.num_slots

    @property
    def max_prefill_length(self) -> int:
        """The largest power of two up to `max_model_len`, because JetStream pads prompts to powers of two."""
        return 1 << (self._engine.config.max_model_len.bit_length() - 1)

    @property
    def mesh(self) -> jax.sharding.Mesh:
        """The mesh of the engine's devices, with one device or several."""
        return self._engine.mesh


class _JetStreamTokenizer(tokenizer_api.Tokenizer):
    """A model's tokenizer with the interface that JetStream's Driver and gRPC clients expect."""

    def __init__(self, tokenizer: tokenizer_lib.Tokenizer):
        self._tokenizer = tokenizer

    def encode(self, s, *, is_bos=False, max_prefill_length=None, **padding):
        ids = np.array(self._tokenizer.encode(s), np.int32)
        if max_prefill_length is not None and len(ids) > max_prefill_length:
            raise ValueError(f"the prompt has {len(ids)} tokens; at most {max_prefill_length} are allowed; shorten it")
        return token_utils.pad_tokens(ids, self.bos_id, self.pad_id, is_bos=False, **padding)

    def decode(self, token_ids, **kwargs):
        return self._tokenizer.decode(token_ids)

    pad_id = bos_id = property(lambda self: self._tokenizer.pad_id)
    eos_id = property(lambda self: self._tokenizer.eos_id)

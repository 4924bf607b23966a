"""Makes JetStream 0.2.2 importable on today's JAX, without side effects; import it instead of `jetstream`.

0.2.2 is the last release (2024-05) and was never updated. Three of its problems are solved here:
1. `orchestrator.delete_pytree` calls `jax.tree_map`, removed in JAX 0.6; without it the first decode kills the process.
2. `token_utils` imports two class names from seqio, whose real package imports TensorFlow (6-11 s). The names are put
   into `sys.modules` first, with or without an installed seqio.
3. `orchestrator` sets the root logger to DEBUG and adds a handler on stdout: two lines per decode step. Undone here.
"""

import logging
import sys
import types

import jax

if not hasattr(jax, "tree_map"):
    jax.__dict__["tree_map"] = jax.tree_util.tree_map

if "seqio" not in sys.modules:
    sys.modules["seqio"] = sys.modules["seqio.vocabularies"] = types.ModuleType("seqio")
    vars(sys.modules["seqio"]).update(Vocabulary=object, SentencePieceVocabulary=object)

_root = logging.getLogger()
_level, _handlers = _root.level, list(_root.handlers)

from jetstream.engine import engine_api, token_utils, tokenizer_api, tokenizer_pb2  # noqa: E402, F401

_root.setLevel(_level)
_root.handlers[:] = _handlers

"""The forms of completions in replies of OpenAI's and vLLM's APIs: the server's, and those of the endpoint that records episodes.

IDs become text up to a stop string. Reasoning and tool calls are parsed out of it (models/text/parsers.py).

Streamed text is held back while it may become a marker or a whole character, so the pieces joined equal the text of a reply
without streaming. A tool call is sent when it is complete.

Imports no jax.
"""

import collections
import functools
import json
import uuid
from collections.abc import Sequence

from inference.engine import request as request_lib
from inference.rollouts import completion as completion_lib
from models.text import parsers
from models.text import tokenizer as tokenizer_lib


class TextFormat:
    """Formats the completions of one request as OpenAI's `choices`, whole or, in a stream, by pieces (Completions of the new tokens)."""

    is_chat, prefix, kind, chunk_kind = False, "cmpl", "text_completion", "text_completion"
    opening: dict | None = None

    def __init__(self, tokenizer: tokenizer_lib.Tokenizer, body, request: request_lib.GenerateRequest):
        self._tokenizer, self.body, self.request = tokenizer, body, request
        # By sample index; filled by a stream alone.
        self._streams = collections.defaultdict(lambda: tokenizer.text_stream(structured=self.is_chat))
        self._texts = collections.defaultdict(str)
        self._places = collections.defaultdict(tokenizer.text_stream)  # by sample index; for offsets
        self._sent = collections.defaultdict(lambda: parsers.Parsed(None, "", ()))

    def choice(self, index: int, completion: completion_lib.Completion) -> dict:
        """Returns a whole completion as an entry of `choices`, without its index."""
        parsed = self._parse(self._tokenizer.decode(completion.tokens), True)
        return {"text": parsed.content} | self.ending(index, completion)

    def delta(self, index: int, piece: completion_lib.Completion) -> dict:
        """Returns the next piece of sample `index` as an entry of `choices`, without its index."""
        before, parsed = self._grow(index, piece)
        return {"text": parsed.content[len(before.content) :]} | self.ending(index, piece)

    def ending(self, index: int, piece: completion_lib.Completion, *, has_calls: bool = False) -> dict:
        """Returns the fields of an entry of `choices` that follow its text; `has_calls` is True if the text has tool calls."""
        reason = "tool_calls" if has_calls and piece.finish_reason == "stop" else piece.finish_reason
        has_logprobs = self.body.logprobs is not None and self.body.logprobs is not False
        return {"finish_reason": reason or None, "logprobs": self._logprobs(index, piece) if has_logprobs else None}

    def _grow(self, index: int, piece: completion_lib.Completion) -> tuple[parsers.Parsed, parsers.Parsed]:
        """Appends a streamed piece to sample `index`. Returns the sample's parsed text (before, after) the piece."""
        final = bool(piece.finish_reason)
        self._texts[index] += self._streams[index].push(piece.tokens, final=final)
        before, self._sent[index] = self._sent[index], self._parse(self._texts[index], final)
        return before, self._sent[index]

    def _parse(self, text: str, final: bool) -> parsers.Parsed:
        return parsers.Parsed(None, _cut_at_stop(text, self.request.stop_texts, final), ())

    def _logprobs(self, index: int, piece: completion_lib.Completion) -> dict:
        tokens = [self._spell(token) for token in piece.tokens]
        # It may not be one of the likeliest.
        own = [{token: x} for token, x in zip(tokens, piece.logprobs, strict=True)]
        tops = [{self._spell(token): x for token, x in top} for top in piece.top]
        return {
            "tokens": tokens,
            "token_logprobs": piece.logprobs,
            "top_logprobs": [top | one for top, one in zip(tops, own, strict=True)] if tops else None,
            "text_offset": self._places[index].offsets(piece.tokens),
        }

    def _spell(self, token: int) -> str:
        if self.body.return_tokens_as_token_ids:
            return f"token_id:{token}"
        return self._tokenizer.spell(token)


class ChatFormat(TextFormat):
    """Formats the completions of a chat, whose text is parsed into reasoning, content, and tool calls."""

    is_chat, prefix, kind, chunk_kind = True, "chatcmpl", "chat.completion", "chat.completion.chunk"
    opening = {"delta": {"role": "assistant", "content": ""}, "finish_reason": None, "logprobs": None}

    def choice(self, index: int, completion: completion_lib.Completion) -> dict:
        parsed = self._parse(self._tokenizer.structured_text(completion.tokens), True)
        return {"message": parsed.message(_call_id)} | self.ending(index, completion, has_calls=bool(parsed.calls))

    def delta(self, index: int, piece: completion_lib.Completion) -> dict:
        before, parsed = self._grow(index, piece)
        new_calls = list(enumerate(parsed.calls))[len(before.calls) :]
        delta = {
            "reasoning_content": (parsed.reasoning or "")[len(before.reasoning or "") :],
            "content": parsed.content[len(before.content) :],
            "tool_calls": [{"index": at} | call.field(_call_id(at)) for at, call in new_calls],
        }
        ending = self.ending(index, piece, has_calls=bool(parsed.calls))
        return {"delta": {name: new for name, new in delta.items() if new}} | ending

    @functools.cached_property
    def _is_in_reasoning(self) -> bool:
        return self._tokenizer.opens_reasoning(self.request.tokens)

    def _parse(self, text: str, final: bool) -> parsers.Parsed:
        return parsers.parse(
            _cut_at_stop(text, self.request.stop_texts, final),
            self._tokenizer.call_format,
            tools=self.body.tools,
            read_calls=bool(self.body.tools) and self.body.tool_choice != "none",
            in_reasoning=self._is_in_reasoning,
            final=final,
        )

    def _logprobs(self, index: int, piece: completion_lib.Completion) -> dict:
        def entry(token: int, logprob: float) -> dict:
            spelled = self._tokenizer.token_bytes(token)
            return {"token": self._spell(token), "logprob": logprob, "bytes": list(spelled)}

        tops = piece.top or [[]] * len(piece.tokens)
        rows = zip(piece.tokens, piece.logprobs, tops, strict=True)
        content = [entry(token, x) | {"top_logprobs": [entry(*pair) for pair in top]} for token, x, top in rows]
        return {"content": content}


def token_choice(index: int, completion: completion_lib.Completion) -> dict:
    """Returns a completion as an entry of `choices` in a reply of vLLM's generate route: token IDs alone."""

    def entry(token: int, logprob: float) -> dict:
        return {"token": f"token_id:{token}", "logprob": logprob}

    content = [entry(*pair) for pair in zip(completion.tokens, completion.logprobs, strict=True)]
    for one, top in zip(content, completion.top, strict=False):
        one["top_logprobs"] = [entry(*pair) for pair in top]
    logprobs = {"content": content}
    ending = {"finish_reason": completion.finish_reason, "logprobs": logprobs}
    return {"index": index, "token_ids": completion.tokens} | ending


def usage(answered: Sequence[tuple[request_lib.GenerateRequest, Sequence[completion_lib.Completion]]]) -> dict:
    """Returns OpenAI's `usage` object, the token counts of all prompts; `cached_tokens` were found in the prefix cache."""
    num_prompt = sum(len(request.tokens) for request, _ in answered)
    num_new = sum(len(completion.tokens) for _, completions in answered for completion in completions)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_new,
        "total_tokens": num_prompt + num_new,
        "prompt_tokens_details": {"cached_tokens": sum(completions[0].num_cached for _, completions in answered)},
    }


def event(chunk: dict) -> str:
    """Returns a server-sent event of a streamed reply."""
    return f"data: {json.dumps(chunk, ensure_ascii=False, separators=(',', ':'), allow_nan=False)}\n\n"


def _call_id(_index: int) -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


def _cut_at_stop(text: str, stops: Sequence[str], final: bool) -> str:
    """Returns the text before the first stop string. Unless `final`, also drops an end that could grow into a stop string."""
    ends = [at for stop in stops if (at := text.find(stop)) >= 0]
    if ends:
        return text[: min(ends)]
    return text if final else parsers.without_partial(text, stops)

"""The real model of tests/support/real_model.py, from the package index to an answer."""

import httpx
import pytest

from models.text import tokenizer as tokenizer_lib
from tests.support import real_model, serving


@pytest.mark.slow
@pytest.mark.real
@pytest.mark.usefixtures("compile_fast")
def test_a_gguf_file_is_served_with_default_flags_and_answers(tmp_path):
    question = [{"role": "user", "content": "What is the capital of France?"}]
    body = {"model": "policy", "messages": question, "max_tokens": 16, "temperature": 0}
    flags = ("--model", real_model.gguf(), "--port", 0, "--exit_with_parent")
    with serving.child(tmp_path, "inference.serve", *flags) as (_, url):

        def post(path, **fields):
            return httpx.post(f"{url}{path}", json=fields, timeout=serving.WAIT_S).json()

        reply = post("/v1/chat/completions", **body)
        rendered = post("/detokenize", tokens=post("/tokenize", messages=question)["tokens"])["prompt"]
        again = post("/v1/completions", prompt=rendered, max_tokens=16, temperature=0)
    answer = reply["choices"][0]["message"]["content"]
    assert "Paris" in answer  # "The capital of France is Paris."
    assert reply["usage"]["prompt_tokens"] == 37  # with the template's own system message
    assert again["choices"][0]["text"] == answer and again["usage"]["prompt_tokens"] == 37


@pytest.mark.real
def test_each_token_of_a_real_vocabulary_has_a_spelling_and_a_place_of_its_own():
    tokenizer, text = tokenizer_lib.load(real_model.gguf()), "日本の首都は東京です🙂é."
    spelled = [tokenizer.spell(id) for id in range(tokenizer.vocab_size)]
    assert len({*spelled}) == len(spelled) == 49152
    ids = tokenizer.encode(text)
    places = tokenizer.text_stream().offsets(ids)
    assert len(ids) > len(text) and [*dict.fromkeys(places)] == [*range(len(text))]  # several tokens of some characters

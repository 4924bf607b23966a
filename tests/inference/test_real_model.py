"""The real model of tests/support/real_model.py, from the package index to an answer."""

import httpx
import pytest

from tests.support import real_model, serving


@pytest.mark.real
@pytest.mark.usefixtures("compile_fast")
def test_a_gguf_file_is_served_with_default_flags_and_answers(tmp_path):
    question = [{"role": "user", "content": "What is the capital of France?"}]
    body = {"model": "policy", "messages": question, "max_tokens": 16, "temperature": 0}
    flags = ("--model", real_model.gguf(), "--port", 0, "--exit_with_parent")
    with serving.child(tmp_path, "inference.serve", *flags) as (_, url):
        reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=serving.WAIT_S).json()
    assert "Paris" in reply["choices"][0]["message"]["content"]  # "The capital of France is Paris."
    assert reply["usage"]["prompt_tokens"] == 37  # with the template's own system message

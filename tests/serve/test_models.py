"""Tokenizer and sampling defaults of a served model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.checkpoints import tiny_llama

from aquifer.config import ModelSpec
from aquifer.errors import ConfigError, RequestError
from aquifer.serve.models import TextModel, check_token_ids, sampling_defaults
from aquifer.serve.protocol.requests import ChatCompletionRequest, CompletionRequest


def _write_defaults(folder: Path, content: object) -> None:
    (folder / "generation_config.json").write_text(json.dumps(content))


def test_requests_get_the_checkpoint_s_defaults(tmp_path: Path):
    _write_defaults(tmp_path, {"temperature": 0.6, "top_k": 20, "top_p": None, "eos_token_id": 1})
    defaults = sampling_defaults(tmp_path)
    assert defaults == {"temperature": 0.6, "top_k": 20}
    params = CompletionRequest(prompt="x", top_k=5).params(defaults)
    assert (params.temperature, params.top_k, params.top_p) == (0.6, 5, 1.0)
    assert params.max_tokens == 16
    chat = ChatCompletionRequest.model_validate({"messages": [{"role": "user", "content": "x"}]})
    assert chat.params(defaults).max_tokens is None


def test_a_beam_search_takes_no_defaults_of_sampling():
    defaults = {"temperature": 0.6, "repetition_penalty": 1.1}
    body = CompletionRequest(prompt="x", use_beam_search=True, n=2, best_of=3, length_penalty=0.5)
    params = body.params(defaults)
    assert (params.n, params.num_sequences, params.num_completions) == (2, 3, 2)
    assert (params.length_penalty, params.repetition_penalty) == (0.5, 1.0)
    with pytest.raises(RequestError, match="repetition_penalty"):
        body.model_copy(update={"repetition_penalty": 1.2}).params(defaults)


@pytest.mark.parametrize("content", [[], {"temperature": -1}, {"top_p": "high" * 10_000}])
def test_impossible_defaults_are_a_config_error(tmp_path: Path, content: object):
    _write_defaults(tmp_path, content)
    with pytest.raises(ConfigError, match=r"generation_config\.json") as caught:
        sampling_defaults(tmp_path)
    assert len(str(caught.value)) < 1000


def test_defaults_in_lists_within_lists_are_a_config_error(tmp_path: Path):
    (tmp_path / "generation_config.json").write_text("[" * 100_000)
    with pytest.raises(ConfigError, match=r"generation_config\.json: no valid JSON"):
        sampling_defaults(tmp_path)


def test_a_checkpoint_without_a_tokenizer_takes_token_ids_only(tmp_path: Path):
    model = TextModel.load(ModelSpec("bare", tmp_path))
    assert model.tokenizer is None
    with pytest.raises(RequestError, match="no tokenizer"):
        model.need_tokenizer()


def test_a_chat_template_replaces_the_checkpoint_s(tmp_path: Path):
    spec = ModelSpec("tiny", tiny_llama(tmp_path / "tiny"))
    tokenizer = TextModel.load(spec, "just this").need_tokenizer()
    expected = tokenizer.encode("just this", add_special_tokens=False)
    assert tokenizer.encode_chat([{"role": "user", "content": "x"}]) == expected


@pytest.mark.parametrize("token_ids", [[], [-1], [0, 8], [2**70]])
def test_token_ids_must_be_in_the_vocabulary(token_ids: list[int]):
    with pytest.raises(RequestError, match="prompt"):
        check_token_ids(token_ids, 8, "prompt")
    check_token_ids([0, 7], 8, "prompt")

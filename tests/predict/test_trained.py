"""The trained predictor: what it reads, what it learns, and the command that trains it."""

from __future__ import annotations

import gc
import gzip
import json
import time
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import DistilBertConfig, DistilBertModel
from typer.testing import CliRunner

from aquifer.cli import app
from aquifer.config import BUNDLED_MODELS
from aquifer.errors import ConfigError
from aquifer.predict.choice import make_forecaster
from aquifer.predict.data import Example, read_examples
from aquifer.predict.encoder import PromptEncoder
from aquifer.predict.ended import EndedOutput
from aquifer.predict.features import NUM_NUMBERS, PADDING, PART_TOKENS, numbers, token_rows
from aquifer.predict.fingerprint import tokenizer_fingerprint
from aquifer.predict.forecaster import Asked, LengthForecaster, Oracle, Outlook
from aquifer.predict.model import LengthPredictor, PredictorConfig
from aquifer.predict.train import (
    predictions,
    report,
    samples_of,
    split_of,
    train,
)

PATIENCE_S = 60.0
RECENT = ((0.0, 0.0),) * 4


def asked(prompt: list[int], **changes: float) -> Asked:
    return replace(Asked(prompt, 1000, recent=RECENT), **changes)  # type: ignore[arg-type]


def end(forecaster: LengthForecaster, outlook: Outlook, num_outputs: int) -> None:
    """An output has ended."""
    forecaster.judge(outlook, num_outputs)
    num_prompt = len(outlook.asked.prompt_token_ids)
    forecaster.learn(EndedOutput(num_prompt, num_outputs, outlook.asked.classes))


def test_the_beginning_and_the_end_of_a_prompt_are_read() -> None:
    rows = token_rows([asked(list(range(1000))), asked([5, 6])])
    assert rows.shape == (2, 2 * PART_TOKENS)
    assert rows[0].tolist() == [*range(PART_TOKENS), *range(1000 - PART_TOKENS, 1000)]
    assert rows[1].tolist() == [5, 6] + [PADDING] * (2 * PART_TOKENS - 2)
    assert numbers([asked([1]), asked([1, 2], temperature=0.0)]).shape == (2, NUM_NUMBERS)


def test_padding_changes_nothing() -> None:
    torch.manual_seed(0)
    predictor = LengthPredictor(PredictorConfig("compact", "")).eval()
    (alone,) = predictor.predict([asked([3, 1, 2])])
    together = predictor.predict([asked([3, 1, 2]), asked(list(range(50)))])[0]
    np.testing.assert_allclose(alone.masses, together.masses, atol=1e-5)


# --- examples -----------------------------------------------------------------------------------


def test_formats_of_examples(tmp_path: Path) -> None:
    lines = tmp_path / "a.jsonl.gz"
    with gzip.open(lines, "wt") as file:
        file.write('{"prompt": "hello", "output_tokens": 5, "temperature": 0.5, "arrival": 2}\n\n')
        file.write('{"prompt_token_ids": [1, 2], "output_tokens": 7, "model": "m"}\n')
        file.write('{"prompt_tokens": 9, "output_tokens": 0}\n')
    first, second = read_examples(lines)
    assert first == Example(5, prompt="hello", temperature=0.5, arrival_s=2.0)
    assert second == Example(7, prompt_token_ids=(1, 2), model="m")
    lists = tmp_path / "b.json"
    lists.write_text('{"instructions": ["x", "y"], "output_tokens": {"a": [1, 2], "b": [3, 4]}}')
    assert [e.output_tokens for e in read_examples(lists)] == [1, 2, 3, 4]
    assert [e.output_tokens for e in read_examples(lists, ("b",))] == [3, 4]
    table = tmp_path / "c.csv"
    table.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"
    )
    assert read_examples(table)[0].prompt_tokens == 374


AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"prompt": "x"}\n', "line 1: this is no example"),
        ("a.jsonl", '{"prompt": "x", "output_tokens": 3}\n{"output_tokens": 3}\n', "line 2: an ex"),
        ("a.jsonl", "[]\n", "line 1: this is no example"),
        ("a.jsonl", '{"prompt": "x", "output_tokens": 3.7}\n', "3.7 must be a whole number"),
        ("a.jsonl", '{"prompt": "x", "output_tokens": true}\n', "True must be a whole number"),
        ("a.jsonl", '{"prompt": 5, "output_tokens": 3}\n', "5 must be a text"),
        ("a.jsonl", '{"prompt_token_ids": [-5], "output_tokens": 3}\n', "-5 must be a whole"),
        ("a.jsonl", '{"prompt": "x", "output_tokens": 3, "arrival": NaN}\n', "nan must be a num"),
        ("a.jsonl", '{"prompt": "x", "output_tokens": 3, "temperature": -1}\n', "at least 0"),
        ("a.json", '{"instructions": ["x"], "output_tokens": {"a": [1, 2]}}', "of the same length"),
        ("a.csv", "TIMESTAMP,ContextTokens\n1,2\n", "line 2: it needs TIMESTAMP"),
        ("a.csv", AZURE + "2023-11-16 18:15:46.6,3,-5\n", "line 2: .*-5 must be a whole"),
        ("a.csv", AZURE + "2023-11-16 18:15:46.6,-3,5\n", "line 2: .*-3 must be a whole"),
        ("a.csv", AZURE + "1" * 200_000 + ",1,1\n", "field larger than"),
        ("a.csv.gz", "damaged", "cannot read"),
        ("a.jsonl", "[" * 200_000, "line 1: this is no example"),
        ("a.json", "[" * 200_000, "RecursionError"),
        ("a.jsonl", '{"prompt": "\\ud800", "output_tokens": 3}\n', "line 1: .*surrogates"),
        (
            "a.jsonl",
            '{"prompt_token_ids": [4294967296], "output_tokens": 3}\n',
            "at most 2147483647",
        ),
        ("a.txt", "", "no format for examples"),
        ("a.jsonl", "", "has no examples"),
    ],
)
def test_bad_examples_are_named(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    if name.endswith(".gz"):
        damaged = bytearray(gzip.compress(bytes(range(256)) * 8))
        damaged[10] = 0xFF  # no such kind of block
        (tmp_path / name).write_bytes(damaged)
    with pytest.raises(ConfigError, match=message):
        read_examples(tmp_path / name)


def test_times_go_on_after_midnight(tmp_path: Path) -> None:
    table = tmp_path / "a.csv"
    table.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 23:59:59.5000000,3,4\n2023-11-17 00:00:01,5,6\n"
    )
    first, second = (example.arrival_s for example in read_examples(table))
    assert first is not None
    assert second is not None
    assert second - first == 1.5


def test_a_prompt_is_in_one_part_only() -> None:
    examples = [
        Example(n + 1, prompt=f"prompt {n}", model=model) for n in range(200) for model in "ab"
    ]
    samples = samples_of(examples, lambda text: [int(text.split()[1]), 7])
    split = split_of(examples, samples)
    prompts = [
        {sample.asked.prompt_token_ids[0] for sample in part}
        for part in (split.train, split.validation, split.test)
    ]
    assert not prompts[0] & prompts[1]
    assert not prompts[0] & prompts[2]
    assert not prompts[1] & prompts[2]
    assert len(split.train) > len(split.test) > 20
    held = split_of(examples, samples, ["b"])
    assert {sample.asked.client for sample in held.test} == {"b"}
    assert {sample.asked.client for sample in held.train} == {"a"}


def test_lengths_alone_are_split_one_by_one() -> None:
    examples = [Example(5, prompt_tokens=9) for _ in range(200)]
    split = split_of(examples, samples_of(examples, None))
    assert len(split.train) > len(split.test) > len(split.validation) > 0
    assert len(split.train) + len(split.test) + len(split.validation) == 200


def test_with_times_the_test_comes_last() -> None:
    examples = [Example(5, prompt_tokens=3, arrival_s=float(n)) for n in range(100)]
    split = split_of(examples, samples_of(examples, None))
    assert list(map(len, (split.train, split.validation, split.test))) == [70, 10, 20]


def test_texts_need_a_tokenizer() -> None:
    with pytest.raises(ConfigError, match="give --tokenizer"):
        samples_of([Example(3, prompt="x")], None)


# --- training -----------------------------------------------------------------------------------


def made_up(count: int = 600) -> list[Example]:
    """Outputs are long if the prompt has token 9, and short if it has token 5."""
    random = np.random.default_rng(0)
    examples = []
    for _ in range(count):
        is_long = random.random() < 0.5
        prompt = random.integers(100, 200, 6).tolist()
        prompt[int(random.integers(6))] = 9 if is_long else 5
        length = int(random.integers(400, 600) if is_long else random.integers(10, 16))
        examples.append(Example(length, prompt_token_ids=tuple(prompt)))
    return examples


@pytest.fixture(scope="module")
def trained() -> LengthPredictor:
    examples = made_up()
    split = split_of(examples, samples_of(examples, None))
    return train(split, PredictorConfig("compact", "abc"), epochs=18)


def test_it_learns_what_prompts_say(trained: LengthPredictor) -> None:
    examples = made_up()
    split = split_of(examples, samples_of(examples, None))
    lengths = [sample.output_tokens for sample in split.test]
    figures = report(predictions(trained, split.test), lengths)
    assert figures["mean_absolute_error"] < 60
    assert figures["log_likelihood"] > -2.2
    # Without the prompt the error is about 240 tokens.
    assert np.abs(np.array(lengths) - np.median(lengths)).mean() > 150
    assert len(figures["calibration"]) == 9


def test_what_was_the_same_in_training_is_ignored(trained: LengthPredictor) -> None:
    (usual,) = trained.predict([asked([9, 1, 2])])
    for changes in ({"most_tokens": 16}, {"top_p": 0.5}, {"temperature": 0.0}):
        (changed,) = trained.predict([asked([9, 1, 2], **changes)])
        np.testing.assert_array_equal(changed.masses, usual.masses)


def test_forecasts_follow_the_prompt_although_lengths_are_noisy() -> None:
    """With a learning rate that is too high, all prompts get one vector and one forecast."""
    random = np.random.default_rng(1)
    examples = []
    for _ in range(600):
        prompt = random.integers(0, 8000, int(random.integers(12, 32))).tolist()
        length = max(int(5 * len(prompt) * random.lognormal(0.0, 0.5)), 1)
        examples.append(Example(length, prompt_token_ids=tuple(prompt)))
    split = split_of(examples, samples_of(examples, None))
    predictor = train(split, PredictorConfig("compact", ""), epochs=15)
    medians = [forecast.quantile(0.5) for forecast in predictions(predictor, split.test)]
    assert len(set(medians)) > 10
    prompts = [len(sample.asked.prompt_token_ids) for sample in split.test]
    assert np.corrcoef(medians, prompts)[0, 1] > 0.8


def test_training_can_begin_with_a_pretrained_encoder(tmp_path: Path) -> None:
    encoder = PromptEncoder("compact")
    with pytest.raises(ConfigError, match=r"config\.json is missing"):
        encoder.load_layers(tmp_path)
    other = PromptEncoder("compact").model
    other.save_pretrained(tmp_path / "right")
    encoder.load_layers(tmp_path / "right")
    for ours, theirs in zip(
        encoder.model.transformer.parameters(), other.transformer.parameters(), strict=True
    ):
        assert torch.equal(ours, theirs)
    config = DistilBertConfig(dim=32, n_layers=1, n_heads=2, hidden_dim=64, vocab_size=100)
    DistilBertModel(config).save_pretrained(tmp_path / "small")
    with pytest.raises(ConfigError, match=r"of \[32, 1, 2, 64\]; it must have \[64, 2, 2, 128\]"):
        encoder.load_layers(tmp_path / "small")
    (tmp_path / "small" / "model.safetensors").write_bytes(b"x")
    with pytest.raises(ConfigError, match="cannot read the pretrained encoder"):
        encoder.load_layers(tmp_path / "small")


def test_a_predictor_is_written_and_read(tmp_path: Path, trained: LengthPredictor) -> None:
    trained.save(tmp_path / "p", {"some": 1})
    loaded = LengthPredictor.load(tmp_path / "p", "abc")
    question = [asked([9, 1, 2]), asked([5, 1, 2])]
    for ours, theirs in zip(trained.predict(question), loaded.predict(question), strict=True):
        np.testing.assert_array_equal(ours.masses, theirs.masses)
    assert loaded.config.outputs > 300
    with pytest.raises(ConfigError, match="another tokenizer"):
        LengthPredictor.load(tmp_path / "p", "other")
    with pytest.raises(ConfigError, match="holds no length predictor"):
        LengthPredictor.load(tmp_path)
    (tmp_path / "served.jsonl").write_text("{}")
    with pytest.raises(ConfigError, match="holds no length predictor"):
        LengthPredictor.load(tmp_path / "served.jsonl")
    broken = LengthPredictor.load(tmp_path / "p")
    broken.center[0] = float("nan")
    broken.save(tmp_path / "q")
    with pytest.raises(ConfigError, match="no finite numbers"):
        LengthPredictor.load(tmp_path / "q")
    (tmp_path / "p" / "model.safetensors").write_bytes(b"x")
    with pytest.raises(ConfigError, match="is damaged"):
        LengthPredictor.load(tmp_path / "p")


def test_too_few_examples() -> None:
    examples = made_up(3)
    with pytest.raises(ConfigError, match="too few"):
        train(split_of(examples, samples_of(examples, None)), PredictorConfig("compact", ""))


def test_a_thread_predicts_and_the_forecast_follows(trained: LengthPredictor) -> None:
    forecaster = LengthForecaster(trained)
    try:
        for number in range(40):
            is_long = number % 2
            outlook = forecaster.arrive(asked([9 if is_long else 5, 100 + number]))
            end_s = time.monotonic() + PATIENCE_S
            while outlook.predicted is None and time.monotonic() < end_s:
                time.sleep(1e-3)
            assert outlook.predicted is not None
            forecaster.forecast(outlook)
            end(forecaster, outlook, 500 if is_long else 12)
        found = [forecaster.forecast(forecaster.arrive(asked([t, 3]))) for t in (9, 5)]
        assert all(each is not None for each in found)
    finally:
        forecaster.close()


def test_a_predictor_that_fails_leaves_recent_lengths(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def predict(self, asked: object) -> list[object]:
            raise RuntimeError("broken")

    forecaster = LengthForecaster(Broken())  # type: ignore[arg-type]
    for _ in range(30):
        end(forecaster, forecaster.arrive(asked([1, 2])), 50)
    forecast = forecaster.forecast(forecaster.arrive(asked([1, 2])))
    forecaster.close()
    assert forecast is not None
    assert 40 < forecast.quantile(0.5) < 60
    assert "the length predictor failed" in caplog.text


def test_a_predictor_that_has_failed_keeps_no_requests() -> None:
    class Prompt(list[int]):
        """A prompt that can be referred to weakly."""

    class Broken:
        def predict(self, asked: object) -> list[object]:
            raise RuntimeError("broken")

    forecaster = LengthForecaster(Broken())  # type: ignore[arg-type]
    prompts: list[weakref.ref[Prompt]] = []
    for _ in range(1000):
        prompt = Prompt([1, 2])
        prompts.append(weakref.ref(prompt))
        forecaster.arrive(asked(prompt))
    forecaster.close()
    gc.collect()
    # At most the batch that failed, which the log has, and the last one.
    assert sum(each() is not None for each in prompts) < 200


def test_choices(tmp_path: Path, trained: LengthPredictor) -> None:
    model = BUNDLED_MODELS["demo"]
    assert make_forecaster("off", model) is None
    assert isinstance(make_forecaster("oracle", model), Oracle)
    assert isinstance(make_forecaster("prior", model), LengthForecaster)
    with pytest.raises(ConfigError, match="choose off, prior or oracle"):
        make_forecaster(str(tmp_path / "nothing"), model)
    trained.save(tmp_path / "p")
    with pytest.raises(ConfigError, match="another tokenizer"):
        make_forecaster(str(tmp_path / "p"), model)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines = [
        {"prompt": f"{'long' if n % 2 else 'short'} story {n}", "output_tokens": 300 * (n % 2) + 9}
        for n in range(120)
    ]
    Path("served.jsonl").write_text("\n".join(map(json.dumps, lines)))
    run = CliRunner().invoke
    arguments = ["predict", "train", "served.jsonl", "--output", "p", "--epochs", "2"]
    assert "give --tokenizer" in str(run(app, arguments).exception)
    with monkeypatch.context() as patched:  # the file is there, and nothing is trained
        patched.setattr("aquifer.predict.train.train", None)
        refused = run(app, [*arguments, "--tokenizer", "demo", "--output", "served.jsonl"])
    assert "--output: cannot write served.jsonl: File exists" in str(refused.exception)
    result = run(app, [*arguments, "--tokenizer", "demo"])
    assert result.exit_code == 0, result.output
    assert "mean absolute error" in result.output
    assert Path("p/calibration.png").stat().st_size > 1000
    fingerprint = tokenizer_fingerprint(BUNDLED_MODELS["demo"])
    assert LengthPredictor.load(Path("p"), fingerprint).config.tokenizer == fingerprint
    result = run(app, ["predict", "report", "p", "served.jsonl", "--tokenizer", "demo"])
    assert result.exit_code == 0, result.output
    assert Path("calibration.png").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--output", "file"], "--output: cannot write"),
        (["--output", "p", "--device", "abacus"], "--device is 'abacus'"),
        (["--output", "p", "--device", "meta"], "--device is 'meta'"),
    ],
)
def test_wrong_options_are_errors_before_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    lines = [f'{{"prompt_tokens": 5, "output_tokens": {1 + i % 7}}}\n' for i in range(100)]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    result = CliRunner().invoke(app, ["predict", "train", "a.jsonl", *arguments])
    assert isinstance(result.exception, ConfigError)
    assert message in str(result.exception)

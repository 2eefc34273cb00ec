"""Traces: what is read, what is refused and how, and the token ids made up for them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from aquifer.errors import ConfigError
from aquifer.sim.trace import (
    PREFIX_BLOCK_TOKENS,
    PromptMaker,
    TraceRequest,
    fit_lengths,
    poisson_arrivals,
    read_trace,
)


def _write(folder: Path, name: str, text: str) -> Path:
    file = folder / name
    if name.endswith(".gz"):
        file.write_bytes(gzip.compress(text.encode()))
    else:
        file.write_text(text)
    return file


AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:51,12,0
"""
PLAIN = "arrival,prompt_tokens,output_tokens,model\n7.5,10,3,small\n7,20,5,\n"
MOONCAKE = [
    {"timestamp": 0, "input_length": 700, "output_length": 6, "hash_ids": [4, 9]},
    {"timestamp": 3052, "input_length": 513, "output_length": 2, "hash_ids": [4, 5]},
]


@pytest.mark.parametrize("name", ["azure.csv", "azure.csv.gz"])
def test_azure(tmp_path, name):
    first, second = read_trace(_write(tmp_path, name, AZURE))  # what generates nothing is left out
    assert (first.arrival_s, first.prompt_tokens, first.output_tokens) == (0.0, 374, 44)
    assert second.arrival_s == pytest.approx(4.314579, abs=1e-6)
    assert (second.prompt_tokens, second.output_tokens) == (396, 109)


def test_plain(tmp_path):
    assert read_trace(_write(tmp_path, "plain.csv", PLAIN)) == [
        TraceRequest(0.0, 20, 5, None),
        TraceRequest(0.5, 10, 3, "small"),
    ]


def test_mooncake(tmp_path):
    text = "\n".join(map(json.dumps, MOONCAKE))
    assert read_trace(_write(tmp_path, "synthetic.jsonl", text)) == [
        TraceRequest(0.0, 700, 6, prefix_ids=(4, 9)),
        TraceRequest(3.052, 513, 2, prefix_ids=(4, 5)),
    ]


def test_lengths_alone(tmp_path):
    questions = '{"question": "one two three four", "output_tokens": 9}\n\n'
    assert read_trace(_write(tmp_path, "q.jsonl", questions)) == [TraceRequest(None, 5, 9)]
    lists = json.dumps({"prompt_tokens": [3, 4], "output_tokens": [5, 6]})
    assert read_trace(_write(tmp_path, "l.json", lists)) == [
        TraceRequest(None, 3, 5),
        TraceRequest(None, 4, 6),
    ]
    several = {"instructions": ["one two three"], "output_tokens": {"a": [7], "b": [8]}}
    file = _write(tmp_path, "s.json.gz", json.dumps(several))
    assert read_trace(file, outputs_of="b") == [TraceRequest(None, 4, 8)]
    with pytest.raises(ConfigError, match="--outputs-of: a, b"):
        read_trace(file)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.txt", "", "use .csv, .jsonl or .json"),
        ("a.csv", "", "line 1: the columns are ''"),
        ("a.csv", "arrival,prompt_tokens\n", "line 1: the columns are 'arrival,prompt_tokens'"),
        ("a.csv", PLAIN + "8,1\n", "line 4: it has 2 fields; it must have 4"),
        (
            "a.csv",
            PLAIN + "8,x,1,\n",
            "line 4: prompt_tokens is 'x'; .* whole number of at least 1",
        ),
        ("a.csv", PLAIN + "8,0,1,\n", "line 4: prompt_tokens is '0'"),
        ("a.csv", PLAIN + "8,4,-1,\n", "line 4: output_tokens is '-1'"),
        ("a.csv", PLAIN + "inf,1,1,\n", "line 4: arrival is 'inf'"),
        ("a.csv", AZURE + "yesterday,1,1\n", "line 5: TIMESTAMP is 'yesterday'; it must be like"),
        ("a.csv", "arrival,prompt_tokens,output_tokens\n", "has no requests"),
        ("a.jsonl", '{"input_length": 1', "line 1: this is not a JSON object"),
        ("a.jsonl", "[1]", "line 1: this is not a JSON object"),
        ("a.jsonl", '\n{"input_length": 1.5}', "line 2: input_length is 1.5"),
        ("a.jsonl", '{"input_length": 1, "timestamp": 0}', "line 1: output_length is None"),
        (
            "a.jsonl",
            '{"input_length": 512, "output_length": 1, "timestamp": 0, "hash_ids": [1, 2]}',
            "line 1: 2 hash_ids for 512 tokens",
        ),
        ("a.jsonl", '{"output_tokens": 3}', "line 1: prompt_tokens is None"),
        ("a.csv", PLAIN + "8," + "1" * 200_000 + ",1,\n", "field larger than"),
        ("a.jsonl", "[" * 200_000, "line 1: this is not a JSON object"),
        ("a.json", "[" * 200_000, "is not valid JSON"),
        ("a.json", "{", "is not valid JSON"),
        ("a.json", "[]", "must be a JSON object"),
        ("a.json", '{"prompt_tokens": [1]}', "a list prompt_tokens and a list output_tokens"),
        ("a.json", '{"prompt_tokens": [1], "output_tokens": []}', "1 prompts and 0 outputs"),
    ],
)
def test_bad_traces(tmp_path, name, text, message):
    with pytest.raises(ConfigError, match=message):
        read_trace(_write(tmp_path, name, text))


def test_no_file_and_no_archive(tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        read_trace(tmp_path / "missing.csv")
    file = tmp_path / "broken.csv.gz"
    file.write_bytes(b"not compressed")
    with pytest.raises(ConfigError, match="cannot read"):
        read_trace(file)
    damaged = bytearray(gzip.compress(bytes(range(256)) * 8))
    damaged[10] = 0xFF  # no such kind of block
    file.write_bytes(damaged)
    with pytest.raises(ConfigError, match="cannot read"):
        read_trace(file)


def test_poisson_arrivals():
    requests = [TraceRequest(None, 1, 2), TraceRequest(None, 3, 4)]
    arrivals = poisson_arrivals(requests, 4.0, 1001, seed=3)
    times = np.array([request.arrival_s for request in arrivals])
    assert len(arrivals) == 1001
    assert [request.prompt_tokens for request in arrivals[:3]] == [1, 3, 1]
    assert (np.diff(times) > 0).all()
    assert times[-1] == pytest.approx(1001 / 4, rel=0.1)
    assert arrivals == poisson_arrivals(requests, 4.0, 1001, seed=3)
    assert arrivals != poisson_arrivals(requests, 4.0, 1001, seed=4)
    half = [request.arrival_s for request in poisson_arrivals(requests, 8.0, 1001, seed=3)]
    assert half == pytest.approx(times / 2)


def test_poisson_arrivals_have_the_rate_and_its_spread():
    arrivals = poisson_arrivals([TraceRequest(None, 1, 2)], 4.0, 100_000, seed=1)
    gaps_s = np.diff([request.arrival_s or 0.0 for request in arrivals], prepend=0.0)
    # Of so many gaps the mean has a standard error of 0.3 %, the deviation one of 0.45 %.
    assert gaps_s.mean() == pytest.approx(1 / 4, rel=0.01)
    assert gaps_s.std() == pytest.approx(1 / 4, rel=0.015)
    assert np.median(gaps_s) == pytest.approx(np.log(2) / 4, rel=0.015)


def test_lengths_beyond_the_context():
    requests = [
        TraceRequest(0.0, 60, 40),
        TraceRequest(1.0, 600, 30, prefix_ids=(1, 2)),
        TraceRequest(2.0, 40, 400, prefix_ids=(3,)),
    ]
    assert fit_lengths(requests, 100, cut=False) == (requests[:1], 2)
    assert fit_lengths(requests, 100, cut=True) == (
        [
            requests[0],
            TraceRequest(1.0, 70, 30),
            TraceRequest(2.0, 40, 50, prefix_ids=(3,)),
        ],
        2,
    )
    assert fit_lengths(requests, 1, cut=True) == ([], 3)


def _prompts(*requests: TraceRequest) -> list[np.ndarray]:
    maker = PromptMaker(requests)
    return [maker.ids(request) for request in requests]


def test_equal_ids_are_equal_tokens_and_all_else_differs():
    size = PREFIX_BLOCK_TOKENS
    first, second, third = _prompts(
        *(
            TraceRequest(0.0, count, 1, prefix_ids=ids)
            for count, ids in ((2 * size + 9, (7, 8)), (size + 100, (7, 9)), (30, ()))
        )
    )
    assert [len(ids) for ids in (first, second, third)] == [2 * size + 9, size + 100, 30]
    assert first.dtype == np.int32
    assert (first[:size] == second[:size]).all()
    rest = np.concatenate((first[size:], second[size:], third))
    assert len(np.unique(rest)) == len(rest)
    assert not np.isin(rest, first[:size]).any()
    assert rest.min() >= 0


@pytest.mark.parametrize("distance", [2**21, 2**22, 2**31, 2**63, 2**64])
def test_distinct_ids_are_distinct_tokens(distance):
    """However far apart they are: hash ids are of 64 bits, token ids of 31."""
    size = PREFIX_BLOCK_TOKENS
    ids = (0, distance, 2 * distance)
    prompts = _prompts(*(TraceRequest(0.0, size, 1, prefix_ids=(number,)) for number in ids))
    assert len(np.unique(np.concatenate(prompts))) == 3 * size


def test_more_tokens_than_ids_are_refused():
    count = PREFIX_BLOCK_TOKENS
    largest = TraceRequest(0.0, 2**30 - count, 1)
    shared = TraceRequest(0.0, count, 1, prefix_ids=(5,))
    PromptMaker([largest, shared, shared])
    with pytest.raises(ConfigError, match="1073741825 different tokens; there are 1073741824"):
        PromptMaker([largest, shared, TraceRequest(0.0, count + 1, 1, prefix_ids=(5,))])


def test_a_prefix_may_end_within_a_block():
    lengths = (100, 90, 50)
    first, second, short = _prompts(
        *(TraceRequest(0.0, count, 1, prefix_ids=(3,), prefix_tokens=80) for count in lengths)
    )
    assert (first[:80] == second[:80]).all()
    assert (short == first[:50]).all()
    rest = np.concatenate((first[80:], second[80:]))
    assert len(np.unique(np.append(rest, first[:80]))) == 30 + 80

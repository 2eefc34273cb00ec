"""Devices that have read the beginning of a prompt before."""

from __future__ import annotations

import aquifer.serve.prefix_places as module
from aquifer.serve.prefix_places import PrefixPlaces

PROMPT = list(range(1000))


def test_what_was_read_is_found_in_powers_of_two() -> None:
    places = PrefixPlaces()
    assert places.num_found("m", None, PROMPT, [0, 1, 2]) == [0, 0, 0]
    places.note(1, "m", None, PROMPT)
    assert places.num_found("m", None, PROMPT, [0, 1, 2]) == [0, 512, 0]
    places.note(2, "m", None, PROMPT[:200])
    assert places.num_found("m", None, PROMPT, [0, 1, 2]) == [0, 512, 128]
    assert places.num_found("m", None, [*PROMPT[:300], *range(5000, 5700)], [0, 1, 2]) == [
        0,
        256,
        128,
    ]
    assert places.num_found("m", None, PROMPT[1:], [0, 1, 2]) == [0, 0, 0]
    assert places.num_found("m", None, PROMPT[:63], [0, 1, 2]) == [0, 0, 0]


def test_models_and_salts_have_their_own() -> None:
    places = PrefixPlaces()
    places.note(0, "m", "salt", PROMPT)
    assert places.num_found("m", "salt", PROMPT, [0]) == [512]
    assert places.num_found("m", None, PROMPT, [0]) == [0]
    assert places.num_found("m", "Salt", PROMPT, [0]) == [0]
    assert places.num_found("n", "salt", PROMPT, [0]) == [0]


def test_a_device_that_has_lost_all() -> None:
    places = PrefixPlaces()
    places.note(0, "m", None, PROMPT)
    places.note(1, "m", None, PROMPT)
    places.forget(0)
    assert places.num_found("m", None, PROMPT, [0, 1]) == [0, 512]
    places.forget(1)
    assert places.num_found("m", None, PROMPT, [0, 1]) == [0, 0]


def test_the_ones_used_last_are_remembered(monkeypatch) -> None:
    monkeypatch.setattr(module, "_MOST_PREFIXES", 3)
    places = PrefixPlaces()
    prompts = [[first] * 64 for first in range(4)]
    for prompt in prompts[:3]:
        places.note(0, "m", None, prompt)
    assert places.num_found("m", None, prompts[0], [0]) == [64]
    places.note(0, "m", None, prompts[3])
    assert [places.num_found("m", None, prompt, [0]) for prompt in prompts] == [
        [64],
        [0],
        [64],
        [64],
    ]

"""How answers end, and which requests and settings never begin."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from helpers.engines import (
    GREEDY,
    MAX_SEQ,
    alone,
    different_tokens,
    greedy,
    open_engine,
    seeded,
)
from ultraflash.runtime import (
    ConfigError,
    Engine,
    Generation,
    RequestError,
    Sampling,
)

# --- how answers end ---


@pytest.mark.parametrize("count", [1, 2, 9])
def test_max_tokens(engine: Engine, count: int) -> None:
    tokens, finish = alone(engine, greedy(1, 9, count, ignore_eos=True))
    assert (len(tokens), finish) == (count, "length")


@pytest.mark.parametrize("room", [1, 2, 5])
def test_the_context_ends_an_answer(engine: Engine, room: int) -> None:
    request = greedy(3, MAX_SEQ - room, 50, ignore_eos=True)
    tokens, finish = alone(engine, request)
    assert (len(tokens), finish) == (room, "length")
    longer = greedy(3, MAX_SEQ - room - 1, 50, ignore_eos=True)
    assert len(alone(engine, longer)[0]) == room + 1


@pytest.mark.parametrize("place", [0, 1, 4])
def test_a_stop_id_ends_the_answer_and_is_not_in_it(engine: Engine, place: int) -> None:
    request, tokens = different_tokens(engine, 6)
    stopped = replace(request, stop_ids=frozenset({tokens[place], 511}))
    assert alone(engine, stopped) == (tokens[:place], "stop")


def test_a_stop_id_beside_the_last_token(engine: Engine) -> None:
    """The last token allowed is a stop id: nothing is missing, so it counts as stopped."""
    request, tokens = different_tokens(engine, 6)
    stopped = replace(request, stop_ids=frozenset({tokens[5]}))
    assert alone(engine, stopped) == (tokens[:5], "stop")


@pytest.fixture
def eos(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> tuple[Generation, list[int]]:
    """A request whose third greedy token is EOS, and what it would say without an end."""
    request, tokens = different_tokens(engine, 6)
    monkeypatch.setattr(engine, "model", replace(engine.model, eos=tokens[2]))
    return replace(request, ignore_eos=False, max_tokens=12), tokens


def test_eos_ends_the_answer_and_is_not_in_it(
    engine: Engine, eos: tuple[Generation, list[int]]
) -> None:
    request, tokens = eos
    assert alone(engine, request) == (tokens[:2], "stop")


def test_other_stop_ids_do_not_let_eos_through(
    engine: Engine, eos: tuple[Generation, list[int]]
) -> None:
    request, tokens = eos
    assert alone(engine, replace(request, stop_ids=frozenset({511}))) == (tokens[:2], "stop")
    assert alone(engine, replace(request, stop_ids=frozenset())) == (tokens[:2], "stop")
    early = replace(request, stop_ids=frozenset({tokens[1]}))
    assert alone(engine, early) == (tokens[:1], "stop")


@pytest.mark.parametrize("least", [0, 1, 2, 3, 7, 12, 40])
def test_min_tokens_keeps_eos_away(
    engine: Engine, eos: tuple[Generation, list[int]], least: int
) -> None:
    request, tokens = eos
    answer, finish = alone(engine, replace(request, min_tokens=least))
    assert len(answer) >= min(least, 12)
    assert answer[:2] == tokens[:2]
    assert engine.model.eos not in answer
    assert finish == ("stop" if len(answer) < 12 else "length")
    if least <= 2:
        assert len(answer) == 2


def test_ignore_eos_goes_on(engine: Engine, eos: tuple[Generation, list[int]]) -> None:
    request, tokens = eos
    answer, finish = alone(engine, replace(request, ignore_eos=True))
    assert (len(answer), finish) == (12, "length")
    assert answer[:2] == tokens[:2]
    assert engine.model.eos not in answer


def test_ignore_eos_leaves_other_stop_ids(
    engine: Engine, eos: tuple[Generation, list[int]]
) -> None:
    request, tokens = eos
    request = replace(request, ignore_eos=True, stop_ids=frozenset({tokens[1]}))
    assert alone(engine, request) == (tokens[:1], "stop")


def test_many_stop_ids_are_never_emitted(engine: Engine) -> None:
    stops = frozenset(range(0, 512, 7))
    finished = set()
    for number in range(12):
        tokens, finish = alone(engine, replace(seeded(number, 5, 25), stop_ids=stops))
        assert not stops & set(tokens)
        finished.add(finish)
    assert "stop" in finished


# --- what is refused ---

REFUSED = {
    "empty prompt": ("ids", {"ids": ()}, ["empty", "at least one"]),
    "prompt as long as the context": (
        "ids",
        {"ids": (5,) * MAX_SEQ},
        [f"{MAX_SEQ} tokens", f"shorten it to {MAX_SEQ - 1}"],
    ),
    "negative id": ("ids", {"ids": (5, -1)}, ["-1", "0 to 511"]),
    "id beyond the vocabulary": ("ids", {"ids": (5, 512)}, ["512", "0 to 511"]),
    "no token wanted": ("max_tokens", {"max_tokens": 0}, ["at least 1", "got 0"]),
    "negative max_tokens": ("max_tokens", {"max_tokens": -3}, ["at least 1", "got -3"]),
    "negative temperature": ("temperature", {"temperature": -0.5}, ["at least 0", "-0.5"]),
    "temperature beyond fp32": ("temperature", {"temperature": 1e39}, ["1e+39"]),
    "infinite temperature": ("temperature", {"temperature": float("inf")}, ["inf"]),
    "temperature that is no number": ("temperature", {"temperature": float("nan")}, ["nan"]),
    "top_p of nothing": ("top_p", {"top_p": 0.0}, ["above 0", "got 0.0"]),
    "top_p above one": ("top_p", {"top_p": 1.5}, ["at most 1", "got 1.5"]),
    "top_p that is no number": ("top_p", {"top_p": float("nan")}, ["nan"]),
    "negative top_k": ("top_k", {"top_k": -1}, ["0 (off) to", "got -1"]),
    "top_k of more than 32 bits": ("top_k", {"top_k": 2**31}, ["0 (off) to", str(2**31)]),
    "negative seed": ("seed", {"seed": -1}, ["0 to", "got -1"]),
    "seed of more than 64 bits": ("seed", {"seed": 2**64}, ["0 to", str(2**64)]),
}


@pytest.mark.parametrize(("field", "change", "words"), REFUSED.values(), ids=REFUSED)
def test_what_can_never_run_is_refused_in_one_sentence(
    engine: Engine, field: str, change: dict[str, object], words: list[str]
) -> None:
    known = {f: v for f, v in change.items() if f in ("ids", "max_tokens")}
    sampling = replace(Sampling(), **{f: v for f, v in change.items() if f not in known})  # type: ignore[arg-type]
    request = replace(greedy(1, 4), sampling=sampling, **known)  # type: ignore[arg-type]
    with pytest.raises(RequestError) as caught:
        engine.submit("bad", request)
    assert caught.value.field == field
    text = str(caught.value)
    assert "\n" not in text
    assert all(word in text for word in words), text
    assert not engine.has_work


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1e-30, seed=0),
        Sampling(temperature=1e30, seed=2**64 - 1),
        Sampling(top_p=1e-30, seed=2**63),
        Sampling(top_k=1, seed=5),
        Sampling(top_k=2**31 - 1, seed=5),
        Sampling(temperature=2, top_p=0.5, top_k=3, seed=9),
    ],
    ids=str,
)
def test_extreme_sampling_is_served(engine: Engine, sampling: Sampling) -> None:
    request = replace(greedy(4, 9, 5), sampling=sampling, ignore_eos=True)
    tokens, _ = alone(engine, request)
    assert len(tokens) == 5
    if sampling.top_k == 1 or sampling.temperature < 1e-9 or sampling.top_p < 1e-9:
        assert tokens == alone(engine, replace(request, sampling=GREEDY))[0]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_sequences": 17}, ["17", "16"]),
        ({"max_seq": 1}, ["1", "at least 2"]),
        ({"max_seq": 257}, ["257", "256"]),
    ],
    ids=["sequences", "no room for an answer", "beyond the model"],
)
def test_settings_that_cannot_work_are_refused(
    engine_cache: Path, settings: dict[str, int], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        open_engine(engine_cache, **settings)
    text = str(caught.value)
    assert "\n" not in text
    assert all(word in text for word in words), text


def test_the_smallest_context(engine_cache: Path) -> None:
    engine = open_engine(engine_cache, max_seq=2)
    assert alone(engine, greedy(1, 1, 9, ignore_eos=True))[1] == "length"
    with pytest.raises(RequestError, match="shorten it to 1"):
        engine.submit("bad", greedy(1, 2))

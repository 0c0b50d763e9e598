"""What we add to the official parser: counts, roles, cut characters, stops, and never a crash."""

from __future__ import annotations

import json
from typing import Any

import deepseek_recipe as recipe
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.chat_vectors import TINY
from ultraflash.server.protocol import Answer, ChatProtocol, Piece
from ultraflash.server.schema import parse_chat

PROTOCOL = ChatProtocol.from_checkpoint(TINY / "ckpt")
TOKENIZER = recipe.Tokenizer.from_file(str(TINY / "ckpt" / "tokenizer.json"))
ENCODE = TOKENIZER.encode
THINK_END = ENCODE("</think>")
EURO = ENCODE("\u20ac")
TOOLS = [{"type": "function", "function": {"name": "clock"}}]


def start(**fields: Any) -> Answer:
    hello = [{"role": "user", "content": "Hello"}]
    body = parse_chat({"model": "deepseek-v4.1-flash", "messages": hello, **fields})
    return PROTOCOL.answer(PROTOCOL.prepare(body, 10_000), "id", body)


def start_plain(**fields: Any) -> Answer:
    return start(thinking={"type": "disabled"}, **fields)


def deltas(pieces: list[Piece]) -> list[dict[str, Any]]:
    return [json.loads(bytes(piece.delta)) for piece in pieces]


def test_the_role_travels_with_the_first_text() -> None:
    answer = start()
    assert deltas(answer.push(ENCODE("Hm"))) == [
        {"role": "assistant", "content": None, "reasoning_content": "Hm"}
    ]
    plain = start_plain()
    assert deltas(plain.push(ENCODE("Yes"))) == [{"role": "assistant", "content": "Yes"}]
    assert deltas(plain.push(ENCODE(" no"))) == [{"content": " no"}]


def test_the_role_comes_with_the_first_token_even_when_its_text_is_held_back() -> None:
    answer = start_plain()
    assert deltas(answer.push(EURO[:1])) == [{"role": "assistant", "content": ""}]
    assert answer.push(EURO[1:2]) == []
    assert deltas(answer.push(EURO[2:])) == [{"content": "\u20ac"}]


def test_an_answer_of_nothing_has_a_role_and_an_end() -> None:
    pieces = start_plain().finish("stop")
    assert deltas(pieces)[0]["role"] == "assistant"
    assert [piece.finish_reason for piece in pieces] == [None, "stop"]


def test_counts_do_not_wait_for_text() -> None:
    answer = start()
    answer.push([*ENCODE("ab"), *EURO[:2]])
    answer.push(THINK_END)
    answer.push(EURO[:1])
    answer.finish("length")
    usage = answer.usage(10, 4)
    assert usage["completion_tokens"] == 6
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 4}
    assert usage["total_tokens"] == 16
    assert (usage["prompt_cache_hit_tokens"], usage["prompt_cache_miss_tokens"]) == (4, 6)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 4}


def test_a_call_ends_the_reasoning_count() -> None:
    answer = start(tools=TOOLS)
    block = "need time\n\n<\uff5cDSML\uff5c calls>\n"
    before = len(ENCODE("need time\n\n<"))
    answer.push(ENCODE(block))
    assert answer.reasoning_tokens == before


def test_a_character_cut_at_the_end_becomes_a_replacement() -> None:
    for start_it, field in ((start, "reasoning_content"), (start_plain, "content")):
        answer = start_it()
        said = deltas(answer.push([*ENCODE("ab"), *EURO[:2]]))
        said += deltas(pieces := answer.finish("length"))
        assert pieces[-1].finish_reason == "length"
        assert "".join(d.get(field) or "" for d in said) == "ab\ufffd"
        assert answer.message()["message"][field] == "ab\ufffd"


def test_a_stop_string_ends_the_answer_and_later_tokens_do_not_count() -> None:
    answer = start_plain(stop=["two"])
    ids = ENCODE("one two three")
    said = answer.push(ids)
    assert answer.stopped
    assert said[-1].finish_reason == "stop"
    assert answer.finish("length") == []
    assert answer.message()["message"]["content"] == "one "
    assert answer.message()["finish_reason"] == "stop"
    assert answer.completion_tokens < len(ids)
    assert answer.push(ENCODE("more")) == []


def test_half_a_stop_string_is_given_out_at_the_end() -> None:
    answer = start_plain(stop=["two"])
    said = deltas(answer.push(ENCODE("one tw")) + answer.finish("stop"))
    assert "".join(d["content"] for d in said) == "one tw"


def test_calls_are_told_piece_by_piece() -> None:
    answer = start_plain(tools=TOOLS)
    text = (
        "<\uff5cDSML\uff5c calls>\n"
        '<\uff5cDSML\uff5c invoke name="clock">\n\n</\uff5cDSML\uff5c invoke>\n'
        "</\uff5cDSML\uff5c calls>"
    )
    pieces = [piece for i in ENCODE(text) for piece in answer.push([i])] + answer.finish("stop")
    calls = [d["tool_calls"][0] for d in deltas(pieces) if "tool_calls" in d]
    assert calls[0]["function"] == {"name": "clock", "arguments": ""}
    assert calls[0]["id"].startswith("call_00_")
    assert all("id" not in call for call in calls[1:])
    assert "".join(call["function"]["arguments"] for call in calls) == "{}"
    assert pieces[-1].finish_reason == "tool_calls"


IDS = st.lists(st.lists(st.integers(0, 600), max_size=8), max_size=30)


@settings(deadline=None, max_examples=150)
@given(steps=IDS, stop=st.sampled_from([[], ["a"], ["ab", "\u20ac"]]), tools=st.booleans())
def test_any_tokens_give_an_answer_that_agrees_with_its_stream(
    steps: list[list[int]], stop: list[str], tools: bool
) -> None:
    answer = start(stop=stop, tools=TOOLS if tools else None)
    pieces: list[Piece] = []
    for ids in steps:
        pieces += answer.push(ids)
        if answer.stopped:
            break
    pieces += answer.finish("length")
    message = answer.message()["message"]
    for field in ("content", "reasoning_content"):
        streamed = "".join(d.get(field) or "" for d in deltas(pieces))
        assert streamed == (message.get(field) or "")
    assert [p.finish_reason for p in pieces if p.finish_reason] == [
        answer.message()["finish_reason"]
    ]
    usage = answer.usage(1, 0)
    assert usage["completion_tokens_details"]["reasoning_tokens"] <= usage["completion_tokens"]

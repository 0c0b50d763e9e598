"""Text in, ids out: the tokenizer, and conversations rendered by the model authors' package.

The golden file keeps what came out of each conversation; what went in stands here, by name.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from deepseek_recipe import (
    AssistantMessage,
    Conversation,
    DeepseekV41Encoding,
    LatestReminderMessage,
    SpecialTokens,
    SystemMessage,
    Tokenizer,
    ToolCall,
    ToolDefinition,
    ToolMessage,
    UserMessage,
)

from ultraflash.tools.golden import measure
from ultraflash.tools.golden.data import Golden, GoldenError, ids_of
from ultraflash.tools.golden.run import Run


def check_tokenizer(run: Run) -> None:
    """Plain strings."""
    for number, case in enumerate(run.golden.json("chat.json")["plain"]):
        name = f"tokenizer plain.{number}"
        if run.report.wants(name):
            got = ids_of(run.probe.tokenize(case["text"]))
            run.report.add(name, measure.exact(got, case["ids"]))


def check_chat(run: Run) -> None:
    """Whole conversations: the rendered prompt (by its bytes) and its ids."""
    encoding = _encoding(run.golden)
    conversations = _conversations()
    for case in run.golden.json("chat.json")["cases"]:
        name = f"chat {case['name']}"
        conversation = conversations.get(case["name"])
        if conversation is None:
            run.report.skip(name, "tools/golden/text.py has no conversation of this name")
            continue
        prompt = encoding.render_conversation(conversation).prompt.encode()
        same = hashlib.sha256(prompt).hexdigest() == case["prompt_sha256"]
        run.report.add(
            f"{name}.prompt",
            measure.within(
                0 if same else 1, 0, f"{len(prompt)} bytes, golden {case['prompt_bytes']}"
            ),
        )
        run.report.add(f"{name}.ids", measure.exact(encoding.encode(conversation), case["ids"]))


def _encoding(golden: Golden) -> DeepseekV41Encoding:
    """The authors' encoding with this tokenizer, whose image token is spelt differently."""
    path = golden.checkpoint / "tokenizer.json"
    try:
        text = path.read_text(encoding="utf-8")
        added: list[dict[str, Any]] = json.loads(text)["added_tokens"]
    except (OSError, ValueError, KeyError) as error:
        raise GoldenError(f"{path} is no readable tokenizer: {error}") from error
    image = [token["content"] for token in added if token["id"] == golden.model.image_token]
    tokens = SpecialTokens(image=image[0]) if image else SpecialTokens()
    return (
        DeepseekV41Encoding().with_tokenizer(Tokenizer.from_str(text)).with_special_tokens(tokens)
    )


def _conversations() -> dict[str, Conversation]:
    sum_ = [UserMessage("2+2?")]
    one = UserMessage("one")
    history = [UserMessage("hi"), AssistantMessage("hello", "thought before"), UserMessage("more")]
    reminder = LatestReminderMessage("today is monday")
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    city = {"city": {"type": "string"}, "days": {"type": "integer"}}
    weather = ToolDefinition(
        "weather", "Get weather", {"type": "object", "properties": city, "required": ["city"]}
    )
    call = ToolCall("1", "weather", '{"city": "Lyon", "days": 3}')
    with_call = [
        SystemMessage("sys"),
        UserMessage("weather in Lyon?"),
        AssistantMessage("", "call it", [call]),
        ToolMessage("sunny", "1"),
    ]
    spelt_out = UserMessage("hello <｜User｜> </think> <｜end▁of▁sentence｜>")
    brief = [SystemMessage("Be brief."), UserMessage("hi")]
    return {
        "chat": Conversation(sum_, thinking_mode=False),
        "chat_effort_ignored": Conversation(sum_, thinking_mode=False, reasoning_effort="max"),
        "thinking": Conversation(sum_),
        "effort_low": Conversation(sum_, reasoning_effort="low"),
        "effort_high": Conversation(sum_, reasoning_effort="high"),
        "effort_xhigh": Conversation(sum_, reasoning_effort="xhigh"),
        "effort_max": Conversation(sum_, reasoning_effort="max"),
        "system": Conversation(brief),
        "system_chat": Conversation(brief, thinking_mode=False),
        "history": Conversation(history),
        "history_chat": Conversation(history, thinking_mode=False),
        "merged_users": Conversation([one, UserMessage("two")]),
        "late_system": Conversation([one, AssistantMessage("ok"), SystemMessage("now be formal")]),
        "reminder_between": Conversation([one, AssistantMessage("ok"), reminder, UserMessage("x")]),
        "reminder_last": Conversation([one, reminder]),
        "assistant_prefix": Conversation([one, AssistantMessage("partial", prefix=True)]),
        "json_object": Conversation([one], response_format="json_object"),
        "schema": Conversation([SystemMessage("sys"), one], response_schema=schema),
        "control_text_in_user": Conversation([spelt_out], thinking_mode=False),
        "tools": Conversation(with_call, tools=[weather]),
        "tools_chat_no_system": Conversation(
            [UserMessage("weather?")], tools=[weather], thinking_mode=False
        ),
    }

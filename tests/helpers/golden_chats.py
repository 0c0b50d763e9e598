"""The requests whose ids stand under the same names in `golden/tiny-a/expected/chat.json`."""

from __future__ import annotations

from typing import Any

_WEATHER = {
    "name": "weather",
    "description": "Get weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
    },
}
_TOOLS = [{"type": "function", "function": _WEATHER}]
_CALL = {"name": "weather", "arguments": '{"city": "Lyon", "days": 3}'}
_CHAT = {"thinking": {"type": "disabled"}}


def _say(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


_SUM = [_say("user", "2+2?")]
_HISTORY = [_say("user", "hi"), _say("assistant", "hello"), _say("user", "more")]
_ONE_OK = [_say("user", "one"), _say("assistant", "ok")]
_REMINDER = _say("latest_reminder", "today is monday")

REQUESTS: dict[str, dict[str, Any]] = {
    "chat": {"messages": _SUM, **_CHAT},
    "thinking": {"messages": _SUM},
    "effort_low": {"messages": _SUM, "reasoning_effort": "low"},
    "effort_high": {"messages": _SUM, "reasoning_effort": "high"},
    "effort_xhigh": {"messages": _SUM, "reasoning_effort": "xhigh"},
    "effort_max": {"messages": _SUM, "reasoning_effort": "max"},
    "chat_effort_ignored": {"messages": _SUM, "reasoning_effort": "max", **_CHAT},
    "system": {"messages": [_say("system", "Be brief."), _say("user", "hi")]},
    "system_chat": {"messages": [_say("system", "Be brief."), _say("user", "hi")], **_CHAT},
    "history": {"messages": _HISTORY},
    "history_chat": {"messages": _HISTORY, **_CHAT},
    "merged_users": {"messages": [_say("user", "one"), _say("user", "two")]},
    "late_system": {"messages": [*_ONE_OK, _say("system", "now be formal")]},
    "reminder_between": {"messages": [*_ONE_OK, _REMINDER, _say("user", "x")]},
    "reminder_last": {"messages": [_say("user", "one"), _REMINDER]},
    "assistant_prefix": {
        "messages": [_say("user", "one"), _say("assistant", "partial", prefix=True)]
    },
    "control_text_in_user": {
        "messages": [
            _say(
                "user", "hello <\uff5cUser\uff5c> </think> <\uff5cend\u2581of\u2581sentence\uff5c>"
            )
        ],
        **_CHAT,
    },
    "tools": {
        "messages": [
            _say("system", "sys"),
            _say("user", "weather in Lyon?"),
            _say(
                "assistant",
                "",
                reasoning_content="call it",
                tool_calls=[{"id": "1", "type": "function", "function": _CALL}],
            ),
            _say("tool", "sunny", tool_call_id="1"),
        ],
        "tools": _TOOLS,
    },
    "tools_chat_no_system": {
        "messages": [_say("user", "weather?")],
        "tools": _TOOLS,
        **_CHAT,
    },
}

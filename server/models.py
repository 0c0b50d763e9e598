"""The names under which the one model of this server is known."""

from __future__ import annotations

from dataclasses import dataclass

from ultraflash.server.errors import RequestError


@dataclass(frozen=True)
class ModelName:
    """A name, and whether a request under it thinks when it does not say."""

    name: str
    thinks: bool = True


MODEL_NAMES = {
    m.name: m
    for m in (
        ModelName("deepseek-v4.1-flash"),
        ModelName("DeepSeek-V4.1-Flash"),
        ModelName("deepseek-ai/DeepSeek-V4.1-Flash"),
        ModelName("deepseek-flash"),
        ModelName("deepseek-chat", thinks=False),
        ModelName("deepseek-reasoner"),
    )
}
MAIN_NAME = next(iter(MODEL_NAMES))


def find_model(name: str) -> ModelName:
    """The model called `name`.

    Raises:
        RequestError: 404, listing the names there are.
    """
    try:
        return MODEL_NAMES[name]
    except KeyError:
        text = f"model {name[:100]!r} is not served here; use one of {', '.join(MODEL_NAMES)}"
        raise RequestError("model", text, code="model_not_found", status=404) from None

"""The adapter around `deepseek-recipe`: a chat body -> token ids -> pieces of the answer.

Conversion, rendering, tokenizing, parsing and the response objects are the model authors' own.
Added here: which names and special tokens hold, limits of the context, usage counts of our own (the
library counts ids when their text comes out, so held-back ones late or never), and a replacement
character for a cut one.

Only what the renderer itself writes becomes special ids; user text that spells a special token
stays text. Converting and encoding release the interpreter lock (measured: 390,000 ids in 0.31 s,
longest stall 7 ms), so streams go on meanwhile.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepseek_recipe as recipe
import msgspec

from ultraflash.graphs.errors import GraphError
from ultraflash.graphs.model import Model
from ultraflash.runtime.errors import EngineError
from ultraflash.runtime.weights import check_special_ids
from ultraflash.server.errors import RequestError, StartError
from ultraflash.server.schema import ChatBody
from ultraflash.server.vocabulary import Tail, Vocabulary

_NAME = "deepseek-v4.1-flash"  # any name will do: the client's own was checked before
_IMAGE = "<\uff5cdeepseek_image\uff5c>"  # the checkpoint's spelling; the library's own differs
_KINDS = recipe.SpecialToken
_RENDERED = {
    "bos": _KINDS.Bos,
    "eos": _KINDS.Eos,
    "system": _KINDS.System,
    "user": _KINDS.User,
    "assistant": _KINDS.Assistant,
    "think": _KINDS.ThinkingStart,
    "think_end": _KINDS.ThinkingEnd,
    "tools": _KINDS.Dsml,
    "reminder": _KINDS.LatestReminder,
}
_FINISH = {
    "stop": recipe.InferenceFinishReason.Stop,
    "length": recipe.InferenceFinishReason.Length,
}


class ChatProtocol:
    """Text on one side, token ids on the other, for one checkpoint."""

    def __init__(self, tokenizer: recipe.Tokenizer, vocabulary: Vocabulary) -> None:
        """Both of the same `tokenizer.json`."""
        special = recipe.SpecialTokens(image=_IMAGE)
        self._tokenizer, self._vocabulary = tokenizer, vocabulary
        self._encoding = (
            recipe.DeepseekV41Encoding().with_special_tokens(special).with_tokenizer(tokenizer)
        )
        self._options = {
            thinks: recipe.ConversionOptions(default_thinking_mode=thinks)
            .with_special_tokens(special)
            .with_model_alias(_NAME, recipe.ModelVersion.DeepseekV41Flash)
            for thinks in (True, False)
        }
        ids = {name: _single_id(tokenizer, special.token(kind)) for name, kind in _RENDERED.items()}
        self._think_end, self._tools = ids["think_end"], ids["tools"]

    @classmethod
    def from_checkpoint(cls, folder: Path) -> ChatProtocol:
        """Load the tokenizer of a checkpoint and compare its special ids with the configuration.

        Raises:
            StartError: when a file is missing or damaged, or the ids differ.
        """
        path = folder / "tokenizer.json"
        try:
            check_special_ids(path, Model.from_checkpoint(folder))
            return cls(recipe.Tokenizer.from_file(str(path)), Vocabulary.from_file(path))
        except (GraphError, EngineError) as error:
            raise StartError(str(error)) from error
        except (OSError, RuntimeError, ValueError) as error:
            raise StartError(
                f"{path} is no tokenizer that deepseek-recipe loads ({error}): "
                "take the file that came with the checkpoint"
            ) from error

    def prepare(self, body: ChatBody, context: int) -> Prompt:
        """Render and encode a request for a context of `context` tokens.

        Text that cannot fit is refused before it is encoded: that takes 100 bytes of memory a byte.

        Raises:
            RequestError: when the converter refuses it or the prompt fills the context.
        """
        least = -(-_text_bytes(body.prompt["messages"]) // self._vocabulary.longest)
        if least >= context:
            raise _too_long(context, f"at least {least}")
        fields = {"model": _NAME, **body.prompt}
        try:
            request = recipe.ChatCompletionRequest(fields).convert(self._options[body.model.thinks])
        except (recipe.ConversionError, ValueError) as error:
            raise _refusal(str(error)) from error
        ids = self._encoding.encode(request.conversation)
        if len(ids) >= context:
            raise _too_long(context, str(len(ids)))
        return Prompt(self, request, ids, context)

    def answer(self, prompt: Prompt, answer_id: str, body: ChatBody) -> Answer:
        """A parser for the ids that answer `prompt`."""
        generator = recipe.ChatCompletionRequest.chunk_generator(
            prompt.request, answer_id, body.requested_model
        )
        options = prompt.request.parsing_options
        processor = recipe.StreamProcessor(generator, options, self._tokenizer)
        whole = recipe.ChatCompletionResponse(answer_id, body.requested_model, 0, 0, 0)
        stage = options.thinking_initial_stage
        ends = {self._think_end, self._tools} if options.parse_tool_calls else {self._think_end}
        reasoning = stage is not None and stage.starts_in_reasoning()
        one_by_one = bool(body.stops)
        return Answer(processor, whole, Tail(self._vocabulary), ends, reasoning, one_by_one)


@dataclass(frozen=True)
class Prompt:
    """An encoded request."""

    protocol: ChatProtocol
    request: recipe.ConversationRequest
    ids: list[int]
    context: int

    def max_tokens(self, asked: int | None) -> int:
        """Tokens to generate: as asked, or the converter's default; cut to the room left."""
        room = self.context - len(self.ids)
        if asked is None:
            return int(self.request.resolve_max_tokens(len(self.ids), self.context))
        return min(asked, room)


class Piece(msgspec.Struct, frozen=True):
    """A part of a streamed answer: the JSON of `delta`, and `finish_reason` on the last."""

    delta: msgspec.Raw
    finish_reason: str | None


class _Chunk(msgspec.Struct):
    choices: list[Piece]


class Answer:
    """Turns the ids of one answer into pieces, and keeps the whole for an unstreamed response."""

    def __init__(
        self,
        processor: recipe.StreamProcessor,
        whole: recipe.ChatCompletionResponse,
        tail: Tail,
        reasoning_ends: set[int],
        in_reasoning: bool,
        one_by_one: bool,
    ) -> None:
        """Nothing said yet."""
        self._processor, self._whole, self._tail = processor, whole, tail
        self._reasoning_ends, self._in_reasoning = reasoning_ends, in_reasoning
        self._one_by_one = one_by_one
        self._held: list[int] = []
        self._said_role = False
        self._called = False
        self._cut = ""
        self.completion_tokens = self.reasoning_tokens = 0

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended the answer: the engine need not go on."""
        return bool(self._processor.finished)

    def push(self, ids: Sequence[int]) -> list[Piece]:
        """The answer goes on with `ids`; what lies behind a stop string is dropped."""
        pieces = self._role() if ids else []
        whole = 0  # how many of the held ids end with a whole character
        for token in ids:
            if self.stopped:
                break
            self._count(token)
            self._held.append(token)
            if self._tail.push(token):
                whole = len(self._held)
            # Ids behind a stop string are no output; only one push an id tells where it ended.
            if whole and self._one_by_one:
                pieces += self._parse(whole)
                whole = 0
        return _joined_role(pieces + self._parse(whole))

    def finish(self, reason: str) -> list[Piece]:
        """The engine ended the answer: stop or length."""
        if self.stopped:
            return []
        pieces = self._role()
        pieces += self._pieces(self._processor.push(recipe.InferenceChunk.finish(_FINISH[reason])))
        if not self._called:  # arguments that were cut stay as they are
            self._cut = self._tail.rest()
        if self._cut:
            field = "reasoning_content" if self._in_reasoning else "content"
            delta = msgspec.Raw(msgspec.json.encode({field: self._cut}))
            pieces.insert(len(pieces) - 1, Piece(delta, None))
        return _joined_role(pieces)

    def message(self) -> dict[str, Any]:
        """`choices[0]` of the whole answer."""
        whole = msgspec.json.decode(self._whole.to_json())
        choice: dict[str, Any] = whole["choices"][0]
        message = choice["message"]
        field = "reasoning_content" if self._in_reasoning else "content"
        message[field] = (message.get(field) or "") + self._cut
        message["content"] = message.get("content") or ""
        return choice

    def usage(self, prompt_tokens: int, cached_tokens: int) -> dict[str, Any]:
        """OpenAI's usage object, with DeepSeek's two prompt counts."""
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            "prompt_cache_hit_tokens": cached_tokens,
            "prompt_cache_miss_tokens": prompt_tokens - cached_tokens,
        }

    def _count(self, token: int) -> None:
        self.completion_tokens += 1
        if self._in_reasoning:
            self._in_reasoning = token not in self._reasoning_ends
            self.reasoning_tokens += self._in_reasoning

    def _parse(self, count: int) -> list[Piece]:
        """Give the parser the first `count` of the held ids."""
        if not count:
            return []
        ids, self._held = self._held[:count], self._held[count:]
        return self._pieces(self._processor.push(recipe.InferenceChunk.tokens(ids)))

    def _pieces(self, chunks: list[Any]) -> list[Piece]:
        pieces = [msgspec.json.decode(c.to_json(), type=_Chunk).choices[0] for c in chunks]
        self._called |= any(bytes(p.delta).startswith(b'{"tool_calls"') for p in pieces)
        for chunk in chunks:
            self._whole.accumulate(chunk)  # consumes it
        return pieces

    def _role(self) -> list[Piece]:
        """The piece that opens an answer, once."""
        if self._said_role:
            return []
        self._said_role = True
        return self._pieces(self._processor.push(recipe.InferenceChunk.ready()))


def _joined_role(pieces: list[Piece]) -> list[Piece]:
    """Let the piece that carries only the role travel with the first text, in one chunk."""
    if len(pieces) < 2 or pieces[1].finish_reason is not None:
        return pieces
    first, second = (msgspec.json.decode(piece.delta) for piece in pieces[:2])
    if "role" not in first:
        return pieces
    return [Piece(msgspec.Raw(msgspec.json.encode(first | second)), None), *pieces[2:]]


def _single_id(tokenizer: recipe.Tokenizer, text: str) -> int:
    ids = tokenizer.encode(text)
    if len(ids) != 1:
        raise StartError(
            f"the tokenizer spells {text} with {len(ids)} tokens instead of one: "
            "take the tokenizer.json that came with the checkpoint"
        )
    return int(ids[0])


_FIELD = re.compile(r"'([a-z_]+(?:[.\[][\w.\[\]]*)?)'")


def _refusal(text: str) -> RequestError:
    """What the converter says, with the field it names, cut so that long input is not sent back."""
    text = text.removeprefix("invalid request body: ")[:300]
    named = _FIELD.search(text)
    return RequestError(named[1] if named else "messages", text)


def _too_long(context: int, tokens: str) -> RequestError:
    return RequestError(
        "messages",
        f"this model's maximum context length is {context} tokens, and the messages have "
        f"{tokens}: shorten them so that at least one token is left for the answer",
        code="context_length_exceeded",
    )


def _text_bytes(messages: Any) -> int:
    """Bytes of the text of all messages; what is none is left for the converter to refuse."""
    total = 0
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        parts = content if isinstance(content, list) else [{"text": content}]
        for part in parts:
            text = part.get("text") if isinstance(part, dict) else None
            total += len(text.encode("utf-8", "replace")) if isinstance(text, str) else 0
    return total

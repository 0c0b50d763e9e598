"""How the engine shall run: one frozen object, and the only place that reads environment variables.

`python -m ultraflash.runtime.config` prints the table of switches with their present values.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ultraflash.graphs.capacity import MAX_ROWS
from ultraflash.graphs.ced import MODES
from ultraflash.graphs.model import Model
from ultraflash.runtime.errors import ConfigError
from ultraflash.runtime.profiles import BLOCKS

BUNDLED_CHECKPOINT = Path(__file__).parent / "bundled" / "tiny"

WIDTHS = ("adaptive", "fixed", "all")
_BACKENDS = ("auto", "numpy", "cuda")
_DUMPS = frozenset({"plan"})


def _default_cache_dir() -> Path:
    return Path("~/.cache/ultraflash").expanduser()


@dataclass(frozen=True)
class RuntimeConfig:
    """Settings of one engine.

    Units: `max_seq` tokens, None = the checkpoint's own limit; `prefill_chunks` rows, ascending.
    `attention_weights` bf16 is a test switch: round as the reference does (model.md 4.4).
    """

    checkpoint: Path = BUNDLED_CHECKPOINT
    backend: str = "auto"
    world: int = 1
    max_sequences: int = 4
    max_seq: int | None = None
    prefill_chunks: tuple[int, ...] = (16, 128)
    prefill: str = "full"  # or ced20, ced21: what of a prompt the decoder layers see
    tail: int = 136  # last prompt tokens that ced20 and ced21 replay through the decoder
    store_bytes: int = 256 << 20  # restore points kept between requests, 0 = none
    segment_tokens: int = 8192  # of global KV in one segment; regular points stand at multiples
    draft_block: int | None = None  # rows of a draft block, 0 = plain decoding; None: as trained
    width: str = "adaptive"  # how many drafts a step verifies; fixed: the profile's thresholds; all
    max_rows: int = 8  # rows that a decode step verifies at most, over all sequences
    attention_weights: str = "fp32"
    cache_dir: Path = field(default_factory=_default_cache_dir)
    check: bool = False
    gpus: tuple[int, ...] = (0,)  # ordinals, as nvidia-smi lists them
    eager: bool = False  # GPU: launch node by node instead of replaying graphs
    trace: Path | None = None  # a JSON line a step: plan, rows, sequences, ms, tokens accepted
    dump: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        """Refuse values that cannot work.

        Raises:
            ConfigError: naming the value, what is allowed and the remedy.
        """
        _one_of("backend", self.backend, _BACKENDS)
        _one_of("attention_weights", self.attention_weights, ("fp32", "bf16"))
        for name, value in (
            ("world", self.world),
            ("max_sequences", self.max_sequences),
            ("max_seq", self.max_seq),
            ("tail", self.tail),
            ("segment_tokens", self.segment_tokens),
        ):
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        if self.store_bytes < 0:
            raise ConfigError(f"store_bytes must be at least 0 (no store), got {self.store_bytes}")
        if not 1 <= self.max_rows <= MAX_ROWS:
            raise ConfigError(f"max_rows must be 1 to {MAX_ROWS}, got {self.max_rows}")
        if self.max_sequences > self.max_rows:
            raise ConfigError(
                f"max_sequences {self.max_sequences} is more than the {self.max_rows} rows of the "
                f"widest step: lower it, or set UF_MAX_ROWS to as many ({MAX_ROWS} at most)"
            )
        if self.draft_block not in (None, 0, *BLOCKS):
            raise ConfigError(
                f"draft_block must be 0 (plain decoding), {', '.join(map(str, BLOCKS))}, "
                f"got {self.draft_block}"
            )
        _one_of("prefill", self.prefill, MODES)
        _one_of("width", self.width, WIDTHS)
        chunks = self.prefill_chunks
        if not chunks or chunks[0] < 1 or list(chunks) != sorted(set(chunks)):
            raise ConfigError(
                f"prefill_chunks must be ascending positive row counts like (16, 128), got {chunks}"
            )
        if unknown := self.dump - _DUMPS:
            raise ConfigError(
                f"cannot dump {', '.join(sorted(unknown))}: choose from {', '.join(sorted(_DUMPS))}"
            )

    @classmethod
    def from_env(cls, **overrides: Any) -> RuntimeConfig:
        """The settings that the switches ask for; `overrides` (not None) win over them.

        Where GPUs are named and no world is, each of them is a rank. Who names GPUs wants them:
        `auto` is then no leave to do without.

        Raises:
            ConfigError: for a malformed value, naming the variable.
        """
        values: dict[str, Any] = {}
        for switch in SWITCHES:
            text = os.environ.get(switch.name, "")
            if text:
                values[switch.field] = switch.read(text)
        values |= {name: value for name, value in overrides.items() if value is not None}
        if "gpus" in values:
            values.setdefault("world", len(values["gpus"]))
            if values.get("backend", "auto") == "auto":
                values["backend"] = "cuda"
        return cls(**values)

    def block(self, model: Model) -> int:
        """Rows that are drafted behind every sequence.

        Raises:
            ConfigError: when the checkpoint has no draft stages to do it.
        """
        if not model.draft_stages:
            if self.draft_block:
                raise ConfigError(
                    f"draft_block {self.draft_block} needs draft stages, this checkpoint has none"
                )
            return 0
        return model.draft_block if self.draft_block is None else self.draft_block


@dataclass(frozen=True)
class Switch:
    """An environment variable, the field it sets, and how its text is understood."""

    name: str
    field: str
    values: str
    meaning: str
    parse: Callable[[str], Any]

    def read(self, text: str) -> Any:
        """The value of `text`.

        Raises:
            ConfigError: naming the variable when the text is malformed.
        """
        try:
            return self.parse(text)
        except ValueError as error:
            raise ConfigError(f"{self.name}={text} is malformed: {error}") from error


def _backend(text: str) -> str:
    if text not in _BACKENDS:
        raise ValueError(f"expected one of {', '.join(_BACKENDS)}")
    return text


def _flag(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError("expected 0 or 1")
    return text == "1"


def _count(text: str) -> int:
    if not text.isdecimal():
        raise ValueError("expected a whole number")
    return int(text)


def _rows(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise ValueError("expected row counts like 16,128")
    return tuple(int(part) for part in parts)


def _ordinals(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise ValueError("expected GPU numbers like 0 or 0,1")
    return tuple(int(part) for part in parts)


def _words(text: str) -> frozenset[str]:
    words = frozenset(word.strip() for word in text.split(","))
    if unknown := words - _DUMPS:
        allowed = ", ".join(sorted(_DUMPS))
        raise ValueError(f"expected words of {allowed}, got {', '.join(sorted(unknown)) or 'none'}")
    return words


SWITCHES = (
    Switch(
        "UF_BACKEND",
        "backend",
        "auto|numpy|cuda",
        "what runs the plans; auto takes what there is, GPUs that are named must be",
        _backend,
    ),
    Switch(
        "UF_CACHE_DIR",
        "cache_dir",
        "directory",
        "token maps and compiled kernels",
        lambda t: Path(t).expanduser(),
    ),
    Switch("UF_CHECK", "check", "0|1", "check every buffer for NaN after each node", _flag),
    Switch("UF_GPUS", "gpus", "0,1,...", "which GPUs to use, in rank order", _ordinals),
    Switch("UF_EAGER", "eager", "0|1", "launch GPU kernels one by one, no graphs", _flag),
    Switch("UF_TRACE", "trace", "file", "write a JSON line for every step that runs", Path),
    Switch(
        "UF_DUMP", "dump", "plan", "write the text of every plan into the cache directory", _words
    ),
    Switch(
        "UF_DRAFT_BLOCK",
        "draft_block",
        "0|5|6|7",
        "rows of a draft block, 0 = plain decoding (default: as trained)",
        _count,
    ),
    Switch(
        "UF_MAX_ROWS",
        "max_rows",
        "rows",
        "rows that a decode step verifies at most",
        _count,
    ),
    Switch(
        "UF_WIDTH",
        "width",
        "|".join(WIDTHS),
        "how many drafts a step verifies: learnt, the profile's thresholds, all that fit",
        str,
    ),
    Switch(
        "UF_PREFILL",
        "prefill",
        "|".join(MODES),
        "what of a prompt the decoder layers see: all of it, or its tail",
        str,
    ),
    Switch(
        "UF_PREFILL_CHUNKS",
        "prefill_chunks",
        "rows,...",
        "sizes of a prompt's chunks, ascending, such as 16,128,1024,4096",
        _rows,
    ),
    Switch("UF_TAIL", "tail", "tokens", "prompt tokens that ced20 and ced21 replay", _count),
    Switch(
        "UF_STORE_BYTES",
        "store_bytes",
        "bytes",
        "memory for conversations that come back, 0 = none",
        _count,
    ),
)


def gpu_numbers(text: str) -> tuple[int, ...]:
    """What "0,1" names.

    Raises:
        ConfigError: when it names nothing.
    """
    numbers: tuple[int, ...] = next(s for s in SWITCHES if s.field == "gpus").read(text)
    return numbers


def prepare_cache_dir(config: RuntimeConfig) -> Path:
    """Create the cache directory and prove that files can be written into it.

    One that holds something may be read-only, as on an image that `capture_graphs` has filled: what
    it lacks says so when it is needed.

    Raises:
        ConfigError: naming the directory, the system's reason and the remedy.
    """
    folder = config.cache_dir
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if config.dump or not any(folder.iterdir()):
            with tempfile.NamedTemporaryFile(dir=folder, prefix=".probe-"):
                pass
    except OSError as error:
        raise ConfigError(
            f"cache directory {folder} is not writable ({error.strerror}): "
            f"set UF_CACHE_DIR to a directory that this user may write"
        ) from error
    return folder


def switch_table(environment: Mapping[str, str]) -> str:
    """One line a switch: name, allowed values, present or default value, meaning."""
    defaults = RuntimeConfig()
    rows = [("switch", "values", "now", "meaning")]
    for s in SWITCHES:
        default = getattr(defaults, s.field)
        text = ",".join(sorted(default)) or "-" if isinstance(default, frozenset) else str(default)
        text = str(int(default)) if isinstance(default, bool) else text
        rows.append((s.name, s.values, environment.get(s.name) or f"{text} (default)", s.meaning))
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    return "\n".join(
        "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=False)) + "  " + row[3]
        for row in rows
    )


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")


def main() -> int:
    """Print the table; a malformed value is reported below it with exit status 2."""
    sys.stdout.write(switch_table(os.environ) + "\n")
    try:
        RuntimeConfig.from_env()
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""`make demo`: one streamed answer in the terminal, with its speed.

Starts a server of its own on a free port, or asks the one at `--url`. A server that it started is
ended in every case: after the answer, after an error, on Ctrl-C.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from typing import Protocol

from rich.cells import cell_len, chop_cells
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from ultraflash.tools.chat_client import ChatError, Meter, chat_body, model_name, stream_chat
from ultraflash.tools.local_server import LocalServer, ServerError

_PROMPT = "implement the tetris game. output HTML code directly - no explanation."
_REFRESH_SECONDS = 0.05


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 after an answer, 1 with one sentence on stderr, 130 after Ctrl-C."""
    options = _parser().parse_args(argv)
    for number in (signal.SIGTERM, signal.SIGHUP):  # so that the server is ended then, too
        signal.signal(number, lambda number, _frame: sys.exit(128 + number))
    console = Console(highlight=False, emoji=False, markup=False)
    try:
        if options.url:
            _answer(console, options.url, options)
        else:
            _start_and_answer(console, options)
    except (ServerError, ChatError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("demo: interrupted", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ultraflash.tools.demo",
        description="Stream one chat answer to the terminal and say how fast it came.",
    )
    parser.add_argument("--url", help="ask the server there, e.g. http://127.0.0.1:8000")
    parser.add_argument("--checkpoint", help="checkpoint folder for the server that is started")
    parser.add_argument("--prompt", default=_PROMPT, help="what to ask")
    parser.add_argument("--max-tokens", type=int, default=200, metavar="N", help="default: 200")
    parser.add_argument("--temperature", type=float, default=1.0, metavar="T", help="default: 1")
    parser.add_argument(
        "--timeout", type=float, default=120.0, metavar="SECONDS", help="how long it may start"
    )
    return parser


def _start_and_answer(console: Console, options: argparse.Namespace) -> None:
    arguments = ["--checkpoint", options.checkpoint] if options.checkpoint else []
    with LocalServer(*arguments) as server:
        with console.status("starting the server") as status:
            seconds = server.wait_ready(
                options.timeout, lambda reason: status.update(_printable(f"starting: {reason}"))
            )
        console.print(f"server ready on {server.url} after {seconds:.1f} s", style="dim")
        if not options.checkpoint:
            console.print(
                "the bundled model is tiny and untrained: its words mean nothing, "
                "the road they take is the real one",
                style="dim",
            )
        _answer(console, server.url, options)


def _answer(console: Console, url: str, options: argparse.Namespace) -> None:
    name = model_name(url)
    console.print(f"{name} < {_printable(options.prompt)}\n", style="bold")
    body = chat_body(
        options.prompt, options.max_tokens, model=name, temperature=options.temperature
    )
    screen: _Screen = _LiveScreen(console) if console.is_terminal else _PlainScreen()
    meter = Meter()
    try:
        for chunk in stream_chat(url, body):
            screen.show(_printable(meter.feed(chunk)), meter)
    finally:
        screen.close()
    console.print(
        f"\n{meter.tokens} tokens, {meter.tokens_per_s:.1f} tokens/s, "
        f"first token after {meter.first_token_ms:.0f} ms (ended by {meter.finish or 'nothing'})",
        style="bold green",
    )


def _printable(text: str) -> str:
    """The text without characters that would steer the terminal."""
    return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text)


class _Screen(Protocol):
    def show(self, text: str, meter: Meter) -> None: ...
    def close(self) -> None: ...


class _PlainScreen:
    """For pipes and files: the text as it comes, nothing else."""

    def show(self, text: str, _meter: Meter) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    def close(self) -> None:
        sys.stdout.write("\n")


class _LiveScreen:
    """For terminals: finished lines scroll away, the open line and the speed stay below them.

    Only the open line is redrawn, so an answer longer than the screen stays whole in the history.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._open = ""
        self._drawn = 0.0
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._live.start()

    def show(self, text: str, meter: Meter) -> None:
        self._open += text
        now = time.monotonic()
        if now - self._drawn < _REFRESH_SECONDS:
            return
        self._drawn = now
        lines = _wrap(self._open, self._console.width)
        self._open = lines.pop()
        if lines:
            self._console.print("\n".join(lines))
        speed = f"{meter.tokens} tokens   {meter.tokens_per_s:.1f} tokens/s"
        self._live.update(Group(Text(self._open), Text(speed, style="cyan")), refresh=True)

    def close(self) -> None:
        self._live.stop()
        self._console.print("\n".join(_wrap(self._open, self._console.width)))


def _wrap(text: str, width: int) -> list[str]:
    """Lines of at most `width` cells, broken at a space where there is one; at least one line."""
    lines = []
    for paragraph in text.split("\n"):
        rest = paragraph
        while cell_len(rest) > width:
            head = chop_cells(rest, width)[0]
            cut = head.rfind(" ")
            keep = head[:cut] if cut > 0 else head
            lines.append(keep)
            rest = rest[len(keep) :].removeprefix(" ") if cut > 0 else rest[len(keep) :]
        lines.append(rest)
    return lines


if __name__ == "__main__":
    sys.exit(main())

"""`python -m ultraflash.server`: checks what can be checked early, then becomes gunicorn.

Each mistake is one sentence on stderr and a non-zero exit status, before anything has started.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ultraflash.graphs.errors import GraphError
from ultraflash.graphs.model import Model
from ultraflash.runtime.config import (
    BUNDLED_CHECKPOINT,
    RuntimeConfig,
    gpu_numbers,
    prepare_cache_dir,
)
from ultraflash.runtime.errors import EngineError
from ultraflash.server.config import ServerConfig
from ultraflash.server.errors import StartError
from ultraflash.server.protocol import ChatProtocol

_ABOUT = """\
Serve DeepSeek-V4.1-Flash over an OpenAI-compatible HTTP API.

With no arguments it serves the tiny random checkpoint that comes with it, on any machine, so that
you can see the whole road work. Then point it at real weights with --checkpoint.
"""

_EXAMPLES = """\
try it:
  python -m ultraflash.server --port 8000
  curl -s localhost:8000/readyz
  curl -sN localhost:8000/v1/chat/completions -d '{"model": "deepseek-v4.1-flash", "stream": true,
    "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 50}'

GET /readyz answers 200 when the engine has loaded and run a step, else 503 and the reason. A GPU
that is missing, full or lost is such a reason: the engine is tried again until it runs.
SIGTERM drains: /readyz says 503 at once, running answers are finished. Ctrl-C stops at once.
Settings of the engine (UF_BACKEND, UF_CACHE_DIR, ...): python -m ultraflash.runtime.config
Exit status: 2 wrong arguments or surroundings, 78 the engine cannot run this checkpoint.
"""

_APP = "ultraflash.server.wsgi:app"
_SETTINGS = "python:ultraflash.server.gunicorn_conf"


def main(argv: Sequence[str] | None = None) -> int:
    """Check, bind, and become gunicorn; returns only when something is wrong."""
    options = _parser().parse_args(argv)
    try:
        if options.weights == "synthetic":
            raise StartError(
                "--weights synthetic is for benchmarks (python -m ultraflash.tools.bench_decode): "
                "its text means nothing; leave it away to serve a checkpoint"
            )
        config = _configure(options)
        _check(config)
        listener = bind(config.host, config.port)
        config = config.with_run_dir()
    except (StartError, EngineError, GraphError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    host, port = listener.getsockname()[:2]
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    sys.stdout.write(f"listening on http://{where} (GET /readyz answers 200 when ready)\n")
    sys.stdout.flush()
    os.set_inheritable(listener.fileno(), True)
    config = replace(config, port=port, listen_fd=listener.fileno())
    command = [sys.executable, "-m", "gunicorn", "-c", _SETTINGS, _APP]
    os.execve(sys.executable, command, config.environment())


def bind(host: str, port: int) -> socket.socket:
    """A listening socket, so that nobody can take the port between this check and its use.

    Raises:
        StartError: when the address cannot be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(2048)
    except (OSError, OverflowError) as error:
        listener.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise StartError(
            f"cannot listen on {host} port {port} ({reason}): choose another with --port or "
            "--host; --port 0 takes a free one"
        ) from error
    return listener


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ultraflash.server",
        description=_ABOUT,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--host", help="address to listen on (127.0.0.1; 0.0.0.0 for all)")
    add("--port", type=int, help="port to listen on (8000); 0 takes a free one and prints it")
    add(
        "--checkpoint", type=Path, metavar="DIR", help="checkpoint in the official layout (bundled)"
    )
    add(
        "--weights",
        choices=("checkpoint", "synthetic"),
        default="checkpoint",
        help="synthetic ones are for benchmarks, and refused here",
    )
    add(
        "--context",
        type=int,
        metavar="N",
        help="tokens of prompt and answer together (model's own)",
    )
    add("--max-sequences", type=int, metavar="N", help="requests that decode at once (4)")
    add("--max-waiting", type=int, metavar="N", help="requests that may wait beside them (64)")
    add("--world", type=int, metavar="N", help="ranks to split the model over (one a GPU)")
    add(
        "--gpus",
        metavar="0,1",
        help="GPUs to use, one a rank; waited for (unnamed: GPU 0, or the CPU where there is none)",
    )
    add("--drain-seconds", type=float, metavar="S", help="from SIGTERM to closing the port (2)")
    return parser


def _configure(options: argparse.Namespace) -> ServerConfig:
    """The environment's settings, overruled by the arguments."""
    named = {
        "host": options.host,
        "port": options.port,
        "checkpoint": options.checkpoint,
        "context": options.context,
        "max_sequences": options.max_sequences,
        "max_waiting": options.max_waiting,
        "world": options.world,
        "gpus": options.gpus,
        "drain_s": options.drain_seconds,
    }
    given = {name: value for name, value in named.items() if value is not None}
    config = replace(ServerConfig.from_env(), **given)
    if config.checkpoint is None:
        config = replace(config, checkpoint=BUNDLED_CHECKPOINT)
    return config.checked()


def _check(config: ServerConfig) -> None:
    """What is quick to find out; the engine checks the weights themselves."""
    checkpoint = config.checkpoint
    if checkpoint is None or not checkpoint.is_dir():
        raise StartError(f"checkpoint {checkpoint} is no directory: give one with --checkpoint DIR")
    model = Model.from_checkpoint(checkpoint)
    if config.context is not None and config.context > model.max_position:
        raise StartError(
            f"context {config.context} is beyond the {model.max_position} positions of this model: "
            "lower --context"
        )
    runtime = RuntimeConfig.from_env(
        checkpoint=checkpoint,
        world=config.world,
        gpus=None if config.gpus is None else gpu_numbers(config.gpus),
        max_sequences=config.max_sequences,
    )
    model.check_world(runtime.world)
    prepare_cache_dir(runtime)
    ChatProtocol.from_checkpoint(checkpoint)


if __name__ == "__main__":
    raise SystemExit(main())

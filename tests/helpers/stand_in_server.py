"""A program with the outside of the server and nothing inside, to test clients and starters with.

    python stand_in_server.py --port N [--slow SECONDS] [--die TEXT] [--stubborn]
                              [--refuse] [--break-off] [--error-event]

It answers a chat with the words of a counting rhyme, two tokens a chunk.
"""

from __future__ import annotations

import argparse
import http.server
import json
import signal
import subprocess
import sys
import time

WORDS = ["one ", "two ", "three ", "four\n", "five ", "\x1b[31msix ", "seven ", "eight\n"]


class Handler(http.server.BaseHTTPRequestHandler):
    options: argparse.Namespace
    started = time.monotonic()

    def do_GET(self) -> None:
        if self.path == "/readyz":
            waiting = time.monotonic() - self.started < self.options.slow
            if waiting:
                return self._json(503, {"status": "starting", "reason": "reading weights"})
            return self._json(200, {"status": "ready"})
        if self.path == "/v1/models":
            return self._json(200, {"object": "list", "data": [{"id": "stand-in"}]})
        return self._json(404, {"error": {"message": f"no {self.path}"}})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.options.refuse:
            return self._json(400, {"error": {"message": "max_tokens is 0; the least is 1"}})
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        self.wfile.write(b": keep-alive\n\n")
        words = (WORDS * (body["max_tokens"] // 16 + 1))[: body["max_tokens"] // 2]
        for i, word in enumerate(words):
            self._event({"delta": {"content": word}, "finish_reason": None}, 2 * (i + 1))
            time.sleep(0.002)
            if self.options.break_off:
                return None
            if self.options.error_event:
                return self._write({"error": {"message": "the engine process ended"}})
        self._event({"delta": {}, "finish_reason": "length"}, 2 * len(words))
        self.wfile.write(b"data: [DONE]\n\n")
        return None

    def _event(self, choice: dict[str, object], tokens: int) -> None:
        usage = {"prompt_tokens": 7, "completion_tokens": tokens, "total_tokens": 7 + tokens}
        self._write({"choices": [{"index": 0, **choice}], "usage": usage})

    def _write(self, chunk: dict[str, object]) -> None:
        self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")

    def _json(self, status: int, value: object) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    parser.add_argument("--drain-seconds")
    parser.add_argument("--slow", type=float, default=0.0)
    parser.add_argument("--die")
    parser.add_argument("--stubborn", action="store_true", help="leave a child that must be killed")
    parser.add_argument("--refuse", action="store_true")
    parser.add_argument("--break-off", action="store_true")
    parser.add_argument("--error-event", action="store_true")
    Handler.options = options = parser.parse_args()
    if options.die:
        sys.exit(options.die)
    if options.stubborn:
        code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
        subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", options.port), Handler)
    print(f"listening on http://127.0.0.1:{server.server_port} (a stand-in)", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()

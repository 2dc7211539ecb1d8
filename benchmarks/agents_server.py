"""The server of ``benchmarks.agents``, a process of its own: chat completions whose every byte was made before.

It says what vLLM says with ``return_token_ids`` and ``logprobs``: token ids of prompt and reply, a log-prob for each.
As little as possible is done for a request, so that two cores are enough for it and for whoever asks.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import sys
from typing import Any

TURNS, PROMPT, SAID = 5, 200, 64
"""Turns of a chat; tokens before the first reply, and of each reply."""
BETWEEN = 20
"""Tokens that the user's next words and the template add."""


def replies() -> list[bytes]:
    """The answers to the first request of a chat, the second and so on: each prompt goes on from what was said."""
    found, prompt = [], list(range(PROMPT))
    for turn in range(TURNS):
        ids = [1000 + 100 * turn + at for at in range(SAID)]
        content: list[dict[str, Any]] = [
            {"token": f" w{each}", "logprob": -each / 1e4, "bytes": None, "top_logprobs": []} for each in ids
        ]
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": f"reply {turn} " + "word " * SAID},
            "finish_reason": "stop",
            "token_ids": ids,
            "logprobs": {"content": content},
        }
        usage = {"prompt_tokens": len(prompt), "completion_tokens": SAID, "total_tokens": len(prompt) + SAID}
        said = {"id": "chat", "object": "chat.completion", "created": 0, "model": "policy", "choices": [choice]}
        body = json.dumps({**said, "usage": usage, "prompt_token_ids": prompt}).encode()
        head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        found.append(head.encode() + body)
        prompt += [*ids, *range(BETWEEN)]
    return found


class Connection(asyncio.Protocol):
    """One connection; its requests come one after the other."""

    said = replies()
    open_now, most = 0, 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport, self.come = transport, b""

    def data_received(self, data: bytes) -> None:
        self.come += data
        head, found, body = self.come.partition(b"\r\n\r\n")
        if found:
            length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n", 1)[0])
            if len(body) >= length:
                self.come = body[length:]
                turn = body.count(b'"assistant"')
                self.transport.write(self.said[turn])


async def serve() -> None:
    """Say where, and serve until the process that started this one ends."""
    server = await asyncio.get_running_loop().create_server(Connection, "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    async with server:
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    asyncio.run(serve())
    os._exit(0)

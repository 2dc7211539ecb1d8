"""Chats with any OpenAI-compatible server, and rollouts that hold the very tokens it sampled.

Needs the extra ``llm``: ``pip install 'forebay[llm]'``; nothing of it is imported before a client is opened. ::

    from forebay import Task, chat


    async def solve(item, ctx):
        talk = ctx.resource.session(ctx)
        reply = await talk.complete(item["prompt"])
        return talk.rollout(reward=float(reply.text.strip() == item["answer"]))


    client = chat.client(["http://gpu1:8000/v1", "http://gpu2:8000/v1"], model="policy")
    math = Task("math", source=source, run=solve, resource=client, group_size=8)
"""

from __future__ import annotations

from tasks.chat.clients import ChatClient as ChatClient
from tasks.chat.clients import ChatOptions as ChatOptions
from tasks.chat.clients import client as client
from tasks.chat.recording import Recorder as Recorder
from tasks.chat.recording import Recording as Recording
from tasks.chat.recording import recorder as recorder
from tasks.chat.session import Reply as Reply
from tasks.chat.session import Session as Session
from tasks.chat.tools import Tool as Tool

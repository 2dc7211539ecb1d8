"""Environments of the ``verifiers`` package as tasks, unchanged.

Needs the extra ``verifiers``: ``pip install 'forebay[verifiers]'``; nothing of it is imported before a task is made. ::

    import verifiers.v1 as vf
    from forebay import Pipeline, chat
    from tasks.verifiers import verifiers_task

    env = vf.load_environment(
        vf.SingleAgentEnvConfig(taskset={"id": "gsm8k"}, agent={"runtime": {"type": "subprocess"}})
    )
    client = chat.client(["http://gpu1:8000/v1", "http://gpu2:8000/v1"], model="policy", temperature=1.0)
    task = verifiers_task(env, client=client, group_size=8)

The environment talks to a recorder (:func:`tasks.chat.recorder`), which asks the client's servers and keeps ids and
log-probs as they were sampled. Both of the package's interfaces are known: ``verifiers.v1`` (:class:`Env`, 0.4 and
newer) and the one before it (``Environment`` with its ``Rubric``, up to 0.3).
"""

from __future__ import annotations

from tasks.verifiers.making import verifiers_task as verifiers_task

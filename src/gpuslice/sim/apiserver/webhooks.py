from __future__ import annotations


async def ask_webhook(session, cluster, call):
    raise NotImplementedError

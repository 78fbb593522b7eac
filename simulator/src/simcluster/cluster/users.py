"""Who sends a request: an administrator, unless the request has the token of a pod's service account.

Nobody is refused for what they are: only policies look at users.
"""

from __future__ import annotations

from simcluster.cluster.request import Object, Request

ADMINISTRATOR: Object = {"username": "system:admin", "groups": ["system:masters", "system:authenticated"]}
_NODE_CLAIM = "authentication.kubernetes.io/node-name"
_POD_CLAIM = "authentication.kubernetes.io/pod-name"


def token_of(namespace: str, account: str, pod: str = "", node: str = "") -> str:
    """A token of the account, bound to a pod and its node where they are named. It says what it is."""
    return ":".join(("simulated", namespace, account, pod, node))


def user_of(request: Request) -> Object:
    """An administrator may also say for whom to answer (``kubectl --as``)."""
    if name := request.headers.get("impersonate-user"):
        parts = name.split(":")
        if parts[:2] == ["system", "serviceaccount"] and len(parts) == 4:
            return user_of_token(token_of(parts[2], parts[3]))
        return {"username": name, "groups": ["system:authenticated"]}
    return user_of_token(request.headers.get("authorization", "").removeprefix("Bearer "))


def user_of_token(token: str) -> Object:
    parts = token.split(":")
    if len(parts) != 5 or parts[0] != "simulated":
        return ADMINISTRATOR
    _, namespace, account, pod, node = parts
    groups = ["system:serviceaccounts", f"system:serviceaccounts:{namespace}", "system:authenticated"]
    claims = {name: [value] for name, value in ((_POD_CLAIM, pod), (_NODE_CLAIM, node)) if value}
    user: Object = {"username": f"system:serviceaccount:{namespace}:{account}", "groups": groups}
    return {**user, "extra": claims} if claims else user

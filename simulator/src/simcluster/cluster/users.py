"""Who sends a request: an administrator, unless the request has the token of a pod's service account.

Nobody is refused for what they are: only policies look at users.
"""

from __future__ import annotations

from simcluster.cluster.request import Object, Request

ADMINISTRATOR: Object = {"username": "system:admin", "groups": ["system:masters", "system:authenticated"]}
_NODE_CLAIM = "authentication.kubernetes.io/node-name"
_POD_CLAIM = "authentication.kubernetes.io/pod-name"
_UID_CLAIM = "authentication.kubernetes.io/pod-uid"


def token_of(namespace: str, account: str, pod: str = "", node: str = "", uid: str = "") -> str:
    """A token of the account, bound to a pod where one is named. Before 1.30 it names no node."""
    return ":".join(("simulated", namespace, account, pod, node, uid))


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
    if len(parts) != 6 or parts[0] != "simulated":
        return ADMINISTRATOR
    _, namespace, account, pod, node, uid = parts
    groups = ["system:serviceaccounts", f"system:serviceaccounts:{namespace}", "system:authenticated"]
    bound_to = ((_POD_CLAIM, pod), (_UID_CLAIM, uid), (_NODE_CLAIM, node))
    claims = {name: [value] for name, value in bound_to if value}
    user: Object = {"username": f"system:serviceaccount:{namespace}:{account}", "groups": groups}
    return {**user, "extra": claims} if claims else user

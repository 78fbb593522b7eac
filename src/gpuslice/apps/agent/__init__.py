"""The node agent: kubelet's device plugin for shared cards, and the keeper of what it says of them."""

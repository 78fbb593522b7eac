"""A kubelet: device manager, sockets, admission, containers as local processes."""

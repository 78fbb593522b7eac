"""kubelet's sockets: device plugin v1beta1 and pod-resources v1."""

"""Stands for the frameworks of the examples: takes the part of the visible card that it is told to take.

The part is vLLM's --gpu-memory-utilization, otherwise half. It answers every path on --port (8000) of its
pod's own loopback address, as a server does once its model is loaded.
"""

import argparse
import http.server
import os

from cuda import MIB, Cuda  # its neighbour in /app

CONTEXT_MIB = 400  # what a framework takes in addition to its pool


class Ready(http.server.BaseHTTPRequestHandler):
    """The same answer for every path."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "3")
        self.end_headers()
        self.wfile.write(b"ok\n")

    def log_message(self, *_: object) -> None:
        """No output: probes arrive every few seconds."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.5)
    parser.add_argument("--port", type=int, default=8000)
    arguments, _ = parser.parse_known_args()
    cuda = Cuda()
    _, total = cuda.memory()
    pool = max(1, int(total / MIB * arguments.gpu_memory_utilization) - CONTEXT_MIB)
    print(f"a card of {total // MIB} MiB; taking {pool} MiB", flush=True)
    cuda.allocate(pool * MIB)
    address = os.environ["SIMCLUSTER_POD_ADDRESS"]
    http.server.ThreadingHTTPServer((address, arguments.port), Ready).serve_forever()


if __name__ == "__main__":
    main()

"""Stands for a Jupyter notebook with TensorFlow: it waits for its user, without device memory.

It answers as Jupyter's login page does, on port 8888 of its pod's own loopback address, where
``kubectl port-forward`` finds it: the pods of a simulated cluster share the machine's network.
"""

import http.server
import os

PORT = 8888
PAGE = b"<!doctype html><title>Jupyter Notebook</title><p>Password: <input type=password></p>\n"


class Page(http.server.BaseHTTPRequestHandler):
    """The same page for every path."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(PAGE)))
        self.end_headers()
        self.wfile.write(PAGE)

    def log_message(self, *_: object) -> None:
        """Jupyter does not log what it answered well."""


def main() -> None:
    address = os.environ["SIMCLUSTER_POD_ADDRESS"]
    server = http.server.ThreadingHTTPServer((address, PORT), Page)
    print(
        "[I NotebookApp] The Jupyter Notebook is running at: http://[all ip addresses on your system]:8888/",
        flush=True,
    )
    server.serve_forever()


if __name__ == "__main__":
    main()

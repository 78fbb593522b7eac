"""Stands for a Jupyter notebook with TensorFlow: it waits for its user, without device memory."""

import signal


def main() -> None:
    print(
        "[I NotebookApp] The Jupyter Notebook is running at: http://[all ip addresses on your system]:8888/"
    )
    signal.pause()


if __name__ == "__main__":
    main()

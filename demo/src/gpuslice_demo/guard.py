"""Ends what a demo started if the demo itself was killed.

It is a separate process: it waits until its standard input closes, which the kernel does for a killed parent,
then kills every process with the demo's mark in its environment and removes the demo's folder. Usage:
guard.py MARK FOLDER; an empty FOLDER if none is to be removed.
"""

import contextlib
import os
import shutil
import signal
import sys
import time


def marked(mark: bytes) -> list[int]:
    """Processes whose environment has the line `mark`, except this one."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdecimal() or int(name) == os.getpid():
            continue
        with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
            if mark in file.read().split(b"\0"):
                found.append(int(name))
    return found


def end(mark: bytes) -> None:
    """In several rounds: a process may have started another just before it was killed."""
    for _ in range(20):
        pids = marked(mark)
        if not pids:
            return
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    end(sys.argv[1].encode())
    if sys.argv[2]:
        shutil.rmtree(sys.argv[2], ignore_errors=True)


if __name__ == "__main__":
    main()

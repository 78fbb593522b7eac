"""Stands for the image gpu-player: TensorFlow that limits itself to its part of the card.

It learns the part from its arguments, as the vendor's no-isolation mode asks of a program.
"""

import argparse
import signal

from cuda import MIB, Cuda  # its neighbour in /app

LIBRARIES_MIB = 184  # cuBLAS, cuDNN and their workspaces beside TensorFlow's pool


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--total", type=float, default=1000, help="Total GPU memory.")
    parser.add_argument("--allocated", type=float, default=1000, help="Allocated GPU memory.")
    arguments, _ = parser.parse_known_args()
    fraction = round(arguments.allocated * 0.7 / arguments.total, 1)
    print(fraction, flush=True)
    cuda = Cuda()
    _, total = cuda.memory()
    cuda.allocate(int(total / MIB * fraction) * MIB)
    cuda.allocate(LIBRARIES_MIB * MIB)
    signal.pause()


if __name__ == "__main__":
    main()

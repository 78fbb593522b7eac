"""Stands for the image tensorflow-gpu-mem: TensorFlow 1.x that takes what it finds.

TensorFlow keeps 300 MiB, or a twentieth, of the free memory for others and takes the rest as one pool; its
libraries take some more beside it.
"""

import signal

from cuda import MIB, Cuda

KEPT_MIB = 300
LIBRARIES_MIB = 112  # cuBLAS and cuDNN: as much as the published table shows in addition to the pool


def main() -> None:
    cuda = Cuda()
    free, _ = cuda.memory()
    pool = free - max(KEPT_MIB * MIB, free // 20)
    cuda.allocate(pool)
    device = "/job:localhost/replica:0/task:0/device:GPU:0"
    print(f"Created TensorFlow device ({device} with {pool // MIB} MB memory)", flush=True)
    cuda.allocate(LIBRARIES_MIB * MIB)
    signal.pause()


if __name__ == "__main__":
    main()

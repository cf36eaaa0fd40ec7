"""Gaussian noise on whole lists of tensors: keyed, so that every worker and every resumed run adds
the same numbers, and drawn by several threads, because a model has millions of weights.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from dpfp_ray.privacy.sampling import keyed_generator

# Weights that share one key. The size is part of what a seed means: another one is other noise.
# torch adds tensors of up to this size in the calling thread, so our threads do not start more.
BLOCK = 2**15


def add_noise(tensors: Sequence[Tensor], std: float, seed: int, step: int) -> None:
    """Add N(0, std²) to every number of `tensors`, in place.

    The noise of block b of tensor i is a pure function of (seed, step, i, b), whatever the number
    of threads, the tensor's device or its layout in memory. It is drawn in fp32 and on the CPU:
    numpy has a generator with a key of 128 bits, torch has none.
    """
    jobs = [
        (number, block)
        for number, tensor in enumerate(tensors)
        for block in range(-(-tensor.numel() // BLOCK))
    ]

    def noise_block(job: tuple[int, int]) -> None:
        number, block = job
        flat = flats[number][block * BLOCK : (block + 1) * BLOCK]
        rng = keyed_generator(seed, f"noise {number} {block}", step)
        noise = torch.from_numpy(rng.standard_normal(flat.numel(), dtype="float32"))
        flat.add_(noise.to(flat.device, flat.dtype), alpha=std)

    # A transposed tensor cannot be seen as one row in the order of its indices; it gets a copy.
    flats = [tensor.detach().contiguous().view(-1) for tensor in tensors]
    threads = min(torch.get_num_threads(), len(jobs))
    if threads > 1:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(noise_block, jobs))  # the list makes an exception in a thread ours
    else:
        for job in jobs:
            noise_block(job)
    for tensor, flat in zip(tensors, flats, strict=True):
        if not tensor.is_contiguous():
            tensor.detach().copy_(flat.view(tensor.shape))

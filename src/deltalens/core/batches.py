"""Anchors in batches: bounded memory, and one worker per core with single-threaded linear algebra."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

Result = TypeVar("Result")

CPU_BLOCK_BYTES = 2**22
"""A batch's gathered rows on a CPU: small enough to stay in cache and in the allocator's reusable heap."""

ACCELERATOR_BLOCK_BYTES = 2**28
"""The same on an accelerator, where a batch must be large enough to fill the machine."""


def batch_size(bytes_per_item: int, device: torch.device) -> int:
    """How many items make up one batch: ``block bytes / bytes_per_item``, at least 1."""
    block = CPU_BLOCK_BYTES if device.type == "cpu" else ACCELERATOR_BLOCK_BYTES
    return max(1, block // max(1, bytes_per_item))


def over_batches(work: Callable[[slice], Result], count: int, size: int, device: torch.device) -> list[Result]:
    """Apply ``work`` to consecutive slices of ``range(count)`` and return its results in order.

    On a CPU the slices are shared among as many workers as torch has threads, each of them single-threaded: batched
    factorisations of small matrices are sequential, and a threaded BLAS inside them only adds waiting.
    """
    slices = [slice(start, min(start + size, count)) for start in range(0, count, size)]
    workers = min(torch.get_num_threads(), len(slices)) if device.type == "cpu" else 1
    if device.type != "cpu" or not slices:
        return [_without_gradients(work, part) for part in slices]
    with _single_threaded():
        if workers == 1:
            return [_without_gradients(work, part) for part in slices]
        with _workers(workers) as pool:
            return list(pool.map(lambda part: _without_gradients(work, part), slices))


def _without_gradients(work: Callable[[slice], Result], part: slice) -> Result:
    # Gradient mode belongs to the thread, so each worker switches it off for itself.
    with torch.no_grad():
        return work(part)


@contextmanager
def _single_threaded() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _workers(count: int) -> Iterator[ThreadPoolExecutor]:
    pool = ThreadPoolExecutor(count, thread_name_prefix="deltalens", initializer=lambda: torch.set_num_threads(1))
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)

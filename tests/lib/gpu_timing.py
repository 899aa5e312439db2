"""How long work takes on a GPU, and how fast that GPU copies: the measure of kernels that are bound by memory."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

_FLUSH_BYTES = 2**29  # several times any L2 cache, and long enough to read that the next launch is ready before it ends


def copy_bandwidths(nbytes: int = 2**32) -> dict[str, float]:
    """Return bytes read and written a second by several ways to copy ``nbytes``; the best is what can be reached.

    Not captured in graphs: a captured `copy_` becomes a node that may run on a copy engine, which is slower than the
    processors are.
    """
    from copy_kernel import copy_kernel

    source = torch.empty(nbytes // 4, dtype=torch.int32, device="cuda").random_()
    target = torch.empty_like(source)
    ways: dict[str, Callable[[], Any]] = {
        "copy_": lambda: target.copy_(source),
        "torch elementwise": lambda: torch.bitwise_not(source, out=target),
    }
    for block, warps in ((2048, 4), (4096, 4), (4096, 8), (8192, 8)):
        ways[f"Triton {block * 4} B, {warps} warps"] = lambda block=block, warps=warps: copy_kernel[
            (source.numel() // block,)
        ](source, target, BLOCK=block, num_warps=warps)
    return {name: 2 * nbytes / (_event_micros(call, 15) * 1e-6) for name, call in ways.items()}


def _event_micros(call: Callable[[], Any], repeats: int, before: Callable[[], Any] = lambda: None) -> float:
    times = []
    for _ in range(repeats + 2):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before()
        start.record()
        call()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3)
    return statistics.median(times[2:])


def gpu_micros(call: Callable[[], Any], repeats: int = 20) -> float:
    """Return the median GPU time of a call in microseconds: without launching, and with nothing in the L2 cache."""
    call()
    torch.cuda.synchronize()
    flush = torch.zeros(_FLUSH_BYTES // 4, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    # Read, not written: lines that have to be written back would cost the call that follows.
    return _event_micros(graph.replay, repeats, flush.sum)


def host_micros(call: Callable[[], Any], repeats: int = 20, *, finished: bool = False) -> float:
    """Return the median time in microseconds until a call returns, or has ``finished`` on the GPU, idle before."""
    times = []
    call()
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        if finished:
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e6)
    torch.cuda.synchronize()
    return statistics.median(times)


def launches(call: Callable[[], Any]) -> int:
    """Return how many kernels, copies and fills a call puts on the stream: the nodes of the graph that captures it.

    Raises:
        RuntimeError: the driver does not tell.
    """
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        call()
    count = ctypes.c_size_t()
    driver = ctypes.CDLL("libcuda.so.1")
    if status := driver.cuGraphGetNodes(ctypes.c_void_p(graph.raw_cuda_graph()), None, ctypes.byref(count)):
        raise RuntimeError(f"cuGraphGetNodes failed with CUresult {status}")
    return count.value

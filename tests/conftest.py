"""Fixtures that several test files share."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from train_support import write_shards

# Deterministic CUDA runs in this process need it, and cuBLAS reads it once, at the first product of any test.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

# Files whose tests train in this process: torch's global switches are put back after each test.
TRAINING = {"test_model", "test_optimizer", "test_loader", "test_train", "test_gpu", "test_attention", "test_candidates"}


@pytest.fixture(autouse=True)
def _restore_process(request: pytest.FixtureRequest) -> Iterator[None]:
    """One thread for arithmetic, and afterwards the threads, SDPA backends, precision and signal handlers from before."""
    if request.module.__name__ not in TRAINING:
        yield
        return
    import torch

    handlers = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)}
    threads, precision, generator = (
        torch.get_num_threads(),
        torch.get_float32_matmul_precision(),
        torch.get_rng_state(),
    )
    switches = torch.backends.cuda
    sdpa = [
        switches.flash_sdp_enabled(),
        switches.mem_efficient_sdp_enabled(),
        switches.math_sdp_enabled(),
        switches.cudnn_sdp_enabled(),
    ]
    torch.set_num_threads(1)
    yield
    for s, handler in handlers.items():
        signal.signal(s, handler)
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision(precision)
    torch.set_rng_state(generator)
    setters = (
        switches.enable_flash_sdp,
        switches.enable_mem_efficient_sdp,
        switches.enable_math_sdp,
        switches.enable_cudnn_sdp,
    )
    for enable, was in zip(setters, sdpa, strict=True):
        enable(was)


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of small synthetic shards of uneven lengths."""
    return write_shards(tmp_path_factory.mktemp("shards"))


@pytest.fixture(scope="session")
def python() -> str:
    """The interpreter for tests that start a process."""
    return sys.executable

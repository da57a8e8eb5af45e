"""Costs of one attention of a steady step on the CPU that launches it: Triton launches, collectives, time of Python.

For one rank of 8 of a model of 40 layers and 40 heads, without a GPU: tensors on the CPU take the way of tensors on a
GPU, launches do nothing, and exchanges are answered at once. Tensors are tiny, so that torch's own work is small: what
remains does not depend on tokens. Collectives and torch's launches cost more on a GPU than they do here.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from dbsp_core import Strategy
from dbsp_core.comm.groups import PendingTransfer
from dbsp_core.config import DbspConfig
from dbsp_core.masks.grid import Video
from dbsp_core.reports.observer import observed_session
from dbsp_core.runtime import chunk_attention, prepared, size
from dbsp_core.sources import MaskRequest
from dbsp_core.sources.synthetic.source import SyntheticSource
from dbsp_kernels.inputs import KernelInputs
from dbsp_kernels.kernel import KERNELS
from dbsp_kernels.tables import pack_bits
from dbsp_kernels.triton import exchange, forward, int8, launch, merge, prediction, schedule, tables
from scripts.bench.alone_rank import AloneRank
from scripts.results.result import Result, Row, arguments

HEADS, HEAD_DIM, LAYERS, WORLD = 40, 8, 40, 8
VIDEO = Video((4, 8, 9))
BLOCKS = {"block_q": 32, "block_k": 16}
PRESET = {"preset": "wan2.1-t2v-14b", "density": 0.4, **BLOCKS}
MASKS: dict[str, dict[str, Any]] = {
    "static": {"source": "synthetic", **PRESET},
    "predicted": {"source": "sparge", **BLOCKS},
}
STRATEGIES = "U8R1", "U2R4", "U1R8"
WARM_UP = 2  # forward passes that are not timed; the first one plans


@dataclass(frozen=True)
class WatchedRank(AloneRank):
    """Counts collectives. What it gathers are the bits of a static mask, so that plans are those of a real one."""

    bits: torch.Tensor = field(kw_only=True)
    started: Counter[str] = field(default_factory=Counter, kw_only=True)

    def start_all_to_all(
        self, sent: torch.Tensor, receive_splits: Sequence[int], send_splits: Sequence[int]
    ) -> PendingTransfer:
        self.started["collectives"] += 1
        return PendingTransfer(sent.new_empty(sum(receive_splits), *sent.shape[1:]), sent, ())

    def all_gather_along(self, mine: torch.Tensor) -> torch.Tensor:
        self.started["collectives"] += 1
        return self.bits


class SteadyCalls:
    """A session's forward passes. Made and called within `gpu_stood_in`."""

    def __init__(self, mask: str, strategy: str) -> None:
        bits = SyntheticSource(**PRESET).mask(MaskRequest(0, HEADS, VIDEO.thw)).bits
        self.group = WatchedRank(0, WORLD, bits=pack_bits(bits))
        config = DbspConfig.load({"mask": MASKS[mask], "reuse": 100.0})
        self.session = observed_session(config, self.group, Strategy.parse(strategy), HEADS, LAYERS)
        shard, self._step = self.session.begin(VIDEO, timestep=1000.0).shard, 0
        shape = 1, shard, HEADS, HEAD_DIM
        self.qkv = [torch.randn(shape).to(torch.bfloat16).transpose(1, 2) for _ in range(3)]

    def forward(self) -> tuple[float, list[float]]:
        """Runs a forward pass; returns the seconds of thread CPU time of its start and of each attention."""
        times = [time.thread_time()]
        self._step += 1
        self.session.begin(VIDEO, timestep=1000.0 - self._step)
        times.append(time.thread_time())
        for layer in range(LAYERS):
            self.session.attend(layer, *self.qkv)
            times.append(time.thread_time())
        begin, *attentions = (after - before for before, after in pairwise(times))
        return begin, attentions


LAUNCHING = exchange, forward, int8, merge, prediction, schedule, tables  # modules that launch Triton kernels


@contextmanager
def gpu_stood_in(launch_kernel: Callable[..., None]) -> Iterator[None]:
    """Lets tensors on the CPU take the way of tensors on a Hopper GPU within the block; their values mean nothing."""
    stream = SimpleNamespace(record_event=lambda: SimpleNamespace(synchronize=lambda: None))
    empty = torch.empty

    def unpinned(*shape: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return empty(*shape, **options)

    with ExitStack() as patches, torch.no_grad():

        def replace(owner: object, name: str, value: object, create: bool = False) -> None:
            patches.enter_context(mock.patch.object(owner, name, value, create=create))

        replace(torch.Tensor, "is_cuda", True, create=True)
        replace(torch, "empty", unpinned)
        replace(torch.cuda, "current_stream", lambda device=None: stream)
        replace(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
        replace(torch.cuda, "get_device_properties", lambda device=None: SimpleNamespace(multi_processor_count=132))
        for module in (prepared, size):
            replace(module, "choose_kernel", lambda *_: KERNELS["triton"])
        replace(KernelInputs, "check_values", lambda self: None)
        replace(chunk_attention, "checks_values", lambda device: False)
        for module in LAUNCHING:
            replace(module, "launch", launch_kernel)
        yield


@contextmanager
def triton_stood_in() -> Iterator[None]:
    """Lets Triton launch kernels that do nothing and are not compiled."""
    current = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
    )
    compiled = SimpleNamespace(
        launch_metadata=lambda *_: None, run=lambda *_: None, function=None, packed_metadata=None
    )

    def keep(self: JITFunction[Any], key: str, signature: object, device: int, *_: object) -> object:
        self.device_caches[device][0][key] = compiled
        return compiled

    before = driver._active
    with (
        mock.patch.object(JITFunction, "_do_compile", keep),
        mock.patch.object(torch.cuda, "current_device", return_value=None),  # as the index of a CPU is: it is current
    ):
        driver.set_active(current)
        try:
            yield
        finally:
            driver._active = before


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """Times the variants by turns, so that all of them see the same machine.

    python_us: thread CPU time of all but launches, least and median over calls
    launch_us: what Triton's launches add to the least time, up to its compiled launcher
    begin_us: the start of a forward pass, once for all layers
    """
    launches: Counter[str] = Counter()

    def count(kernel: Any, *_: Any, **__: Any) -> None:
        launches["launches"] += 1

    names = [(mask, strategy) for mask in MASKS for strategy in STRATEGIES]
    begins, attentions, launched = ({name: [] for name in names} for _ in range(3))
    with gpu_stood_in(count):
        variants = {name: SteadyCalls(*name) for name in names}
        for calls in variants.values():
            for _ in range(WARM_UP):
                calls.forward()
        counts = {}
        for name, calls in variants.items():
            launches.clear(), calls.group.started.clear()
            calls.session.attend(0, *calls.qkv)
            counts[name] = launches["launches"], calls.group.started["collectives"]
    gc.freeze()  # or each collection would go through all variants
    for _ in range(options.passes):
        for name, calls in variants.items():
            with gpu_stood_in(count):
                begin, times = calls.forward()
            begins[name].append(begin)
            attentions[name] += times
            with gpu_stood_in(launch.launch), triton_stood_in():
                launched[name] += calls.forward()[1]
    gc.unfreeze()
    for name in names:
        least, python = min(attentions[name]), statistics.median(attentions[name])
        yield Row(
            mask=name[0],
            strategy=name[1],
            launches=counts[name][0],
            collectives=counts[name][1],
            least_python_us=round(1e6 * least),
            python_us=round(1e6 * python),
            launch_us=round(1e6 * (min(launched[name]) - least)),
            begin_us=round(1e6 * statistics.median(begins[name])),
        )


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.add_argument("--passes", type=int, default=25, help="timed forward passes of each variant")
    Result("steady-call", "One attention of a steady step").run(parser, measure)

"""What each way for keys to travel is worth under masks that are predicted at every call: CSV in docs/results.

    python -m scripts.bench.keys.predicted_masks                 # records the small model's masks first: some minutes
    python -m scripts.bench.keys.predicted_masks --masks FILE    # the same, the recording kept in FILE or read from it

counted:  density, bytes, and the share of keys that the last step's rows did not need
modelled: seconds, with the constants of dbsp_configs/hardware and the network rate that the row names; each way takes
          its best UxRy in its best layout

Compared are the ring; all keys in chunks; kept keys, planned by the last step's mask, with what this step's adds in a
second exchange; and a bound that is not built: exactly the keys that this call's mask needs, known before anything
travels ("exact"), of plans that are made for nothing.

Masks of the small model are of single tokens, in which it has as many as Wan2.1 has blocks at 720p: each stands for a
block of 64 tokens. Its four layers' heads are taken together, as 48 heads of one layer.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from dbsp_core.config.config import DbspConfig
from dbsp_core.cost.comm_volume import traffic_of
from dbsp_core.cost.hardware import Hardware, load_hardware
from dbsp_core.cost.latency import AttentionShape, Topology, exchange_cost_of, predict
from dbsp_core.cost.selection import fastest_plan, in_fastest_chunks
from dbsp_core.layout.sequence_layout import SequenceLayout
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.masks.grid import BlockGrid
from dbsp_core.planning.kept_keys import KeptKeys
from dbsp_core.planning.plan import Plan, make_plan
from dbsp_core.planning.planners import PaperConfig, PlannerConfig
from dbsp_core.sources import LocalQK, MaskRequest, SpargeSource, SyntheticSource
from dbsp_core.sources.base import Changes
from dbsp_core.sources.synthetic.presets import PRESETS
from scripts.results.result import FOLDER, write_csv

STEPS, PAIR = 12, (7, 8)
"""Denoising steps of the small model's video, and the two neighbouring ones that are looked at."""
LEARNED = {"topk 0.1": {"topk": 0.1}, "topk 0.2": {"topk": 0.2}, "cdf 0.85": {"cdf": 0.85}}
SYNTHETIC = (
    ("wan2.1-t2v-14b-sparge", 0.1),
    ("wan2.1-t2v-14b-sparge", 0.2),
    ("wan2.1-t2v-14b-sparge", 0.414),
)
MACHINES = (
    ("h200", 1, 8, None),
    ("h200", 2, 8, 40),
    ("h200", 4, 8, 40),
    ("h200", 2, 4, 10),
    ("h200", 2, 1, 10),
    ("a800", 2, 8, 20),
)
"""Hardware, nodes, GPUs of each, and GB/s of each GPU between nodes."""
LABEL = "bytes counted, times modelled; exact keys are not built"


@dataclass(frozen=True)
class Worth:
    """One mask on one machine.

    kv_received: K and V that a rank receives, in shares of one rank's Q
    added: keys that this step's mask adds, over those kept from the last step, mean over ranks
    all_speedup, kept_speedup, exact_speedup: over the ring
    kept_over_others: of kept keys over the better one of the ring and all keys in chunks
    auto: the way that is predicted fastest when plans are made, before it is known what a mask adds
    """

    mask: str
    density: float
    hardware: str
    nodes: int
    gpus: int
    gb_per_s: str
    ring: str
    ring_ms: float
    ring_kv_received: float
    all: str
    all_ms: float
    all_kv_received: float
    kept: str
    kept_ms: float
    kept_kv_received: float
    added: float
    exact_ms: float
    exact_kv_received: float
    all_speedup: float
    kept_speedup: float
    exact_speedup: float
    kept_over_others: float
    auto: str
    label: str = LABEL


@dataclass
class Recorder:
    """A mask source that gives one mask and keeps those of several thresholds, of the pair of steps."""

    given: SpargeSource
    changes: Changes = "per_call"
    found: dict[str, list[np.ndarray]] = field(default_factory=dict)

    def grid(self, request: MaskRequest) -> BlockGrid:
        return self.given.grid(request)

    def mask(self, request: MaskRequest, tokens: LocalQK) -> BlockMask:
        if request.cfg_branch == 0 and request.step in PAIR:
            for name, how in LEARNED.items():
                one = SpargeSource(block_q=1, block_k=1, similarity=-1.0, **how).mask(request, tokens)
                self.found.setdefault(f"{name}, step {request.step}", []).append(one.bits.numpy())
        return self.given.mask(request, tokens)


def record(path: Path) -> None:
    """Writes the small model's masks of single tokens, all layers' heads after one another."""
    from dbsp_diffusers.reference import attach_single_process
    from scripts.training.trained_model.demo import PREDICTED
    from scripts.training.trained_model.small_model import FRAMES, HEIGHT, PROMPTS, WIDTH, load_pipeline

    source = DbspConfig.load({"mask": PREDICTED}).mask
    assert isinstance(source, SpargeSource)
    pipeline, recorder = load_pipeline(), Recorder(source)
    attach_single_process(pipeline.transformer, DbspConfig(mask=recorder))
    pipeline(
        prompt=PROMPTS[0],
        negative_prompt="",
        height=HEIGHT,
        width=WIDTH,
        num_frames=FRAMES,
        num_inference_steps=STEPS,
        guidance_scale=3.0,
        generator=torch.Generator().manual_seed(0),
        output_type="latent",
    )
    np.savez(path, **{name: np.packbits(np.concatenate(bits), axis=-1) for name, bits in recorder.found.items()})


def masks(recording: Path) -> Iterator[tuple[str, BlockMask, BlockMask]]:
    """Names, and the masks of two neighbouring steps."""
    file = np.load(recording)
    grid = BlockGrid(9 * 72 * 120, 0, 64, 64, (9, 72, 120))  # the model's 9 × 9 × 15 tokens, 64 for each
    for name in LEARNED:
        both = (np.unpackbits(file[f"{name}, step {step}"], axis=-1, count=grid.nk).astype(bool) for step in PAIR)
        last, now = (BlockMask(bits, grid) for bits in both)
        yield f"small model, {name}", last, now
    for preset, density in SYNTHETIC:
        last, now = synthetic(preset, density)
        yield preset, last, now


def synthetic(preset: str, density: float, steps: Sequence[int] = PAIR) -> list[BlockMask]:
    """The masks of these steps."""
    model, source = PRESETS[preset].model, SyntheticSource(preset=preset, density=density, block_q=128)
    of_step = partial(MaskRequest, 0, model.heads, model.thw, model.text_tokens, layers=model.layers)
    return [source.mask(of_step(step=step)) for step in steps]


@dataclass(frozen=True)
class Machine:
    """A machine and the ranks on it, by which one mask's plans are timed."""

    hardware: Hardware
    topology: Topology

    @classmethod
    def of(cls, name: str, nodes: int, gpus: int, gb_per_s: float | None) -> Machine:
        machine = load_hardware(name)
        network = {} if gb_per_s is None else {"network_bytes_per_s": gb_per_s * 1e9}
        constants = replace(machine.constants, **network)
        return cls(replace(machine, constants=constants), Topology(nodes * gpus, gpus))

    @property
    def strategies(self) -> list[Strategy]:
        """Those whose slots or heads are not so few that they are out of the question."""
        return [one for one in Strategy.all_for(self.topology.world) if one.ring <= 8]

    def places(self, mask: BlockMask) -> Iterator[tuple[Strategy, str, SequenceLayout]]:
        """Strategies with layouts and their names."""
        for strategy in self.strategies:
            for name in ("striped", "contiguous"):
                yield strategy, name, SequenceLayout.named(name, mask.grid, strategy)

    def seconds(self, plan: Plan, layout: SequenceLayout) -> float:
        return predict(plan, _shape(plan), self.hardware, self.topology, layout).total_s

    def chunked(self, plan: Plan, mask: BlockMask, layout: SequenceLayout) -> Plan:
        return in_fastest_chunks(plan, mask, _shape(plan), self.hardware, self.topology, layout)


@dataclass(frozen=True)
class Timed:
    """layout: its name"""

    plan: Plan
    layout: str
    seconds: float
    kv_received: float
    added: float = 0.0

    @classmethod
    def of(cls, plan: Plan, name: str, layout: SequenceLayout, machine: Machine, added: float = 0.0) -> Timed:
        share = plan.heads * plan.grid.tokens / machine.topology.world
        received = traffic_of(plan.assignment, layout).kv_received / share
        return cls(plan, name, machine.seconds(plan, layout), received, added)

    def __str__(self) -> str:
        return f"{self.plan.strategy} {self.layout}"


def _shape(of: Plan | BlockMask) -> AttentionShape:
    return AttentionShape(1, of.heads, of.grid.tokens, 128, 2)


def fastest(mask: BlockMask, keys: str, strategy: Strategy, layout: SequenceLayout, machine: Machine) -> Plan:
    """The plan that a session makes."""
    shape, hardware, topology = _shape(mask), machine.hardware, machine.topology
    cost = exchange_cost_of(mask, strategy, shape, hardware, topology)

    def make(planner: str, equal_heads: bool) -> Plan:
        config = PlannerConfig(planner, exchange_cost=cost, paper=PaperConfig(equal_heads=equal_heads))
        return make_plan(mask, strategy, config, layout=layout, compare=False, keys=keys)

    return machine.chunked(fastest_plan(make, shape, hardware, topology, layout), mask, layout)


def sent_whole(mask: BlockMask, keys: str, machine: Machine) -> Iterator[Timed]:
    """Keys that go round the ring, or all of them in chunks, for each strategy and layout."""
    for strategy, name, layout in machine.places(mask):
        yield Timed.of(fastest(mask, keys, strategy, layout, machine), name, layout, machine)


def sent_by_need(last: BlockMask, now: BlockMask, machine: Machine) -> Iterator[tuple[Timed, Timed, Timed]]:
    """With kept keys, as planned by the last step's mask, and under this one; with exactly those that are needed."""
    for strategy, name, layout in machine.places(now):
        plan, of_all = fastest(last, "kept", strategy, layout, machine), fastest(now, "all", strategy, layout, machine)
        kept = plan.assignment.keys
        assert isinstance(kept, KeptKeys)
        called = kept.with_mask(plan.assignment, now)
        assert called.added is not None
        needed = KeptKeys.of(of_all.assignment, of_all.assignment.keys.slot, now).settled
        exact = machine.chunked(of_all.with_keys(needed, now), now, layout)
        yield (
            Timed.of(plan, name, layout, machine),
            Timed.of(
                plan.with_keys(called, now), name, layout, machine, float(called.added.sum() / called.sent.sum())
            ),
            Timed.of(exact, name, layout, machine),
        )


def worth(name: str, last: BlockMask, now: BlockMask, setting: tuple[str, int, int, float | None]) -> Worth:
    """One row."""
    machine = Machine.of(*setting)

    def least(timed: Iterator[Timed]) -> Timed:
        return min(timed, key=lambda one: one.seconds)

    ring, every = (least(sent_whole(now, keys, machine)) for keys in ("ring", "all"))
    planned, kept, exact = map(least, map(iter, zip(*sent_by_need(last, now, machine), strict=True)))
    ways = {"ring": ring.seconds, "all": every.seconds, "kept": planned.seconds}
    hardware, nodes, gpus, gb_per_s = setting
    return Worth(
        mask=name,
        density=now.density,
        hardware=hardware,
        nodes=nodes,
        gpus=nodes * gpus,
        gb_per_s="NVLink" if gb_per_s is None else f"{gb_per_s:g}",
        ring=str(ring),
        ring_ms=ring.seconds * 1e3,
        ring_kv_received=ring.kv_received,
        all=str(every),
        all_ms=every.seconds * 1e3,
        all_kv_received=every.kv_received,
        kept=str(kept),
        kept_ms=kept.seconds * 1e3,
        kept_kv_received=kept.kv_received,
        added=kept.added,
        exact_ms=exact.seconds * 1e3,
        exact_kv_received=exact.kv_received,
        all_speedup=ring.seconds / every.seconds,
        kept_speedup=ring.seconds / kept.seconds,
        exact_speedup=ring.seconds / exact.seconds,
        kept_over_others=min(ring.seconds, every.seconds) / kept.seconds,
        auto=min(ways, key=ways.__getitem__),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--masks", type=Path, default=Path("out/predicted-masks.npz"), help="recording of the small model"
    )
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder for the CSV")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if not options.masks.exists():
        options.masks.parent.mkdir(parents=True, exist_ok=True)
        record(options.masks)
    rows = []
    for name, last, now in masks(options.masks):
        for setting in MACHINES:
            rows.append(worth(name, last, now, setting))
            print(rows[-1], flush=True)
            write_csv("needed-keys-predicted", rows, options.out)


if __name__ == "__main__":
    main()

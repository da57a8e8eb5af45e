"""`dbsp bench`: measures a model's attention on this machine, for `strategy: auto` and `kernel: auto`.

Compared runs are interleaved, so that clock drift affects all of them. A time is the slowest rank's, median over the
turns, by CUDA events on GPUs and the host's clock on CPUs.
"""

from __future__ import annotations

import datetime
import itertools
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import typer

from dbsp_cli.generate.ranks import RankInfo
from dbsp_cli.output import PATH, JsonFlag, TextTable, print_json, print_tables
from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.comm.process_groups import meet
from dbsp_core.config import default_config
from dbsp_core.cost.machine import (
    Constants,
    Hardware,
    KernelConstants,
    device_class,
    load_hardware,
    measured_file,
    save_hardware,
    shipped_hardware,
)
from dbsp_core.cost.prediction import MERGE_BYTES, AttentionShape, Prediction, predict
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.masks.grid import BlockGrid
from dbsp_core.models.signature import ModelSignature
from dbsp_core.models.table import (
    MODEL_SPECS,
    ModelSpec,
    find_model_spec,
    published_model,
    signature_of_model,
    unknown_model,
)
from dbsp_core.planning.plan import Plan, make_plan, usual_layout
from dbsp_core.reports.page import ON_CPU
from dbsp_core.runtime.attention import DualBalancedAttention
from dbsp_core.runtime.tables import KernelTable, build_tables, table_layout
from dbsp_core.utils.errors import in_number
from dbsp_core.utils.files import require_file_path
from dbsp_core.utils.process import NOTICE, installed_version
from dbsp_kernels import KERNELS, KernelRequirements, PartialAttention, block_attention, choose_kernel, merge_into
from dbsp_kernels.triton.launch import capability_of
from dbsp_kernels.triton.tiles import row_slots

MOST_ERROR = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Largest relative error against float64 of an exact kernel."""
SPARSE = 0.25  # fraction of active blocks at which kernels and whole attentions are compared
_DENSITIES = (0.1, SPARSE, 0.5, 1.0)
_ON_CPU = 8, 2048  # most heads and tokens on a CPU, where measurements are only for trying out
_WRONG = 0.5  # relative error of a prediction above which the user is warned
_PLAIN = "contiguous"

Action = Callable[[], object]


def bench_command(
    model: Annotated[str, typer.Argument(help=f"Whose attention: {', '.join(MODEL_SPECS)}, or a folder.")],
    out: Annotated[
        Path | None, typer.Option(help="Constants file to write. Default: this machine's, which runs read.", **PATH)
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Measure kernels, exchanges and attentions on this machine, for strategy: auto and kernel: auto.

    One process measures one GPU. For all GPUs of a node: torchrun --nproc-per-node 8 -m dbsp_cli bench MODEL

    Also runs under srun and MPI.
    """
    from dbsp_diffusers.rank_program import process_group, use_local_device  # here: it takes seconds to import

    identity = signature_of_model(model)
    if identity is None:
        raise unknown_model(model)
    rank_info = RankInfo.from_environment(os.environ)
    if rank_info is not None:
        rank_info.export()
    device = use_local_device()
    out = out or measured_file(device.type)
    require_file_path(out, "--out")
    with nullcontext() if rank_info is None else process_group(device):
        # 1. Times, and the constants that are fitted to them; the others are those of a shipped machine like this one
        work = Workload.of_model(identity, find_model_spec(model) or published_model(identity), device)
        others = shipped_hardware(device) or load_hardware("h100" if device.type == "cuda" else "cpu-demo")
        measured = measure(work, others)
    # 2. Write the constants file
    hardware = measured.hardware(out.stem, work)
    record = {
        "versions": {
            "dbsp-attention": installed_version("dbsp-attention") or "not installed",
            "torch": str(torch.__version__),
            "kernel": work.kernel,
        },
        "residuals": {part: round(error, 4) for part, error in measured.residual.items()},
        "date": datetime.date.today().isoformat(),
        "notes": f"dbsp bench {model}: {work}. Errors of kernels: "
        + "; ".join(f"{k.kernel} {k.blocks} {k.problem or f'{k.error:.1e}'}" for k in measured.kernels),
    }
    if rank_info is None or rank_info.local == 0:  # nodes may have separate folders
        save_hardware(out, hardware, record)
    if work.group.rank:
        return
    # 3. Print results
    if as_json:
        kernels = [
            {key: None if value != value else value for key, value in k._asdict().items()} for k in measured.kernels
        ]
        values = {"kernels": kernels, "dense_s": measured.dense_s, "attentions": measured.attentions}
        print_json(model=model, ranks=work.group.size, file=str(out), hardware=asdict(hardware) | record, **values)
    else:
        print_tables(_tables(f"{model} on {hardware.device}, measured: {work}", measured))
    if device.type == "cpu":
        work.say(ON_CPU)
    if work.group.size == 1:
        work.say(f"one rank exchanges nothing, so exchange rates are those of {others.name}, not measured")
    worst = max(abs(run["predicted_s"] / run["seconds"] - 1) for run in measured.attentions)
    if worst > _WRONG:
        work.say(f"predicted times are off by up to {worst:.0%}, perhaps because other programs ran; measure again")
    print(f"wrote {out}", file=sys.stderr)


@dataclass(frozen=True)
class Workload:
    """One model's attention and the ranks to measure it on."""

    heads: int
    head_dim: int
    tokens: int
    blocks: tuple[int, int]  # block_q and block_k
    dtype: torch.dtype
    device: torch.device
    group: SequenceGroup
    sizes: Sequence[int] = range(16, 29, 3)  # log2 of the bytes that a rank sends, for the rates of exchanges
    repeats: int = 9

    @classmethod
    def of_model(cls, identity: ModelSignature, spec: ModelSpec | None, device: torch.device) -> Workload:
        """Returns a model's attention on all ranks, reduced on a CPU."""
        mask = default_config(identity, spec).mask
        work = cls(
            heads=identity.sizes[1],
            head_dim=identity.sizes[2],
            tokens=_ON_CPU[1] if spec is None else spec.tokens,
            blocks=(getattr(mask, "block_q", 64), getattr(mask, "block_k", 64)),
            dtype=torch.bfloat16,
            device=device,
            group=SequenceGroup.from_group(),
        )
        if device.type != "cpu":
            return work
        most_heads, most_tokens = _ON_CPU
        work = replace(work, heads=min(work.heads, most_heads), tokens=min(work.tokens, most_tokens))
        return replace(work, dtype=torch.float32, sizes=range(12, 23, 3), repeats=5)

    def __str__(self) -> str:
        ranks, blocks = in_number(self.group.size, "rank"), "×".join(map(str, self.blocks))
        return f"{ranks}, {self.heads} heads of {self.head_dim}, {self.tokens:,} tokens, blocks of {blocks}"

    @property
    def kernel(self) -> str:
        """The kernel for timing attentions."""
        return choose_kernel("auto", self.device, self.dtype).name

    @property
    def local_heads(self) -> int:
        """Heads per rank without a ring."""
        return max(1, self.heads // self.group.size)

    def say(self, text: str) -> None:
        if self.group.rank == 0:
            print(f"{NOTICE}{text}", file=sys.stderr, flush=True)

    def mask(self, heads: int, density: float, tokens: int = 0, blocks: tuple[int, int] | None = None) -> BlockMask:
        """Makes a random mask, by default of all tokens in the model's blocks.

        Densities of heads, rows and columns vary by factors of 0.5 to 1.5, so contiguous plans are imbalanced.
        """
        grid = BlockGrid(tokens or self.tokens, 0, *(blocks or self.blocks))
        if density == 1:
            return BlockMask.dense(heads, grid)
        rng = np.random.default_rng(0)
        head, row, column = (np.linspace(0.5, 1.5, n, dtype=np.float32) for n in (heads, grid.nq, grid.nk))
        likely = density * row[:, None] * column
        bits = [rng.random(likely.shape, dtype=np.float32) < share * likely for share in head]
        return BlockMask(torch.from_numpy(np.stack(bits)), grid)

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=self.device, dtype=self.dtype)

    def gathered(self, value: Any) -> list[Any]:
        """Returns every rank's value. Collective."""
        values = [value] * self.group.size
        if self.group.size > 1:
            dist.all_gather_object(values, value)
        return values

    def medians(self, actions: Sequence[Action]) -> np.ndarray:
        """Returns the seconds of each action, float64[actions]; all ranks start each action together. Collective."""
        for action in [*actions] * 2:
            action()
        seconds = np.array([[self._seconds(action) for action in actions] for _ in range(self.repeats)])
        slowest = np.max(self.gathered(seconds), axis=0)  # [ranks, repeats, actions] → [repeats, actions]
        return np.asarray(np.median(slowest, axis=0))

    def _seconds(self, action: Action) -> float:
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            torch.cuda.synchronize()
        if self.group.size > 1:
            meet()
        if not on_gpu:
            start = time.perf_counter()
            action()
            return time.perf_counter() - start
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        action()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3

    def whole(self, mask: BlockMask, strategy: Strategy, planner: str) -> tuple[Plan, Action]:
        """Prepares an attention; returns its plan, and an action that runs it on random q, k, v."""
        layout = usual_layout(planner, mask.grid, strategy)
        plan = make_plan(mask, strategy, planner, layout=layout)
        attend = DualBalancedAttention.prepare(plan, mask, layout, self.group, device=self.device, kernel=self.kernel)
        return plan, partial(attend, *(self.random(1, mask.heads, layout.shard, self.head_dim) for _ in range(3)))

    def predicted(self, plan: Plan, constants: Constants) -> Prediction:
        shape = AttentionShape(1, plan.heads, self.head_dim, self.dtype.itemsize)
        machine = Hardware("being measured", "", "", constants, {})
        return predict(plan, shape, machine, layout=usual_layout(plan.planner, plan.grid, plan.strategy))


class Rows(NamedTuple):
    """A kernel's input for all rows of some heads: q [rows, Bq, D], k and v [KV blocks, Bk, D]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    table: KernelTable
    tokens: int
    flops: float  # Of the products of active blocks

    @classmethod
    def from_mask(cls, work: Workload, mask: BlockMask) -> Rows:
        grid = mask.grid
        layout = table_layout(make_plan(mask, "U1R1", _PLAIN), 0).to(work.device)
        q = work.random(len(layout.rows), grid.block_q, work.head_dim)
        (table,) = build_tables(layout, mask).expanded(slots=row_slots(q, (grid.block_q, grid.block_k)))
        k, v = (work.random(len(table.kv_len), grid.block_k, work.head_dim) for _ in range(2))
        flops = 4.0 * int(mask.bits.sum()) * grid.block_q * grid.block_k * work.head_dim
        return cls(q, k, v, table, grid.tokens, flops)

    def attend(self, kernel: str) -> PartialAttention:
        whole: dict[str, Any] = {} if KERNELS[kernel].returns_lse else {"head_tokens": self.tokens, "lse": False}
        return block_attention(self.q, self.k, self.v, **vars(self.table), kernel=kernel, **whole)

    def error(self, kernel: str, rows: int = 16) -> float:
        """Returns the relative error of the shortest and longest rows against float64; NaN if not finite."""
        out, _ = self.attend(kernel)
        order = self.table.kv_count.argsort()
        picked = torch.cat([order[: rows // 2], order[-(rows // 2) :]])
        table = {name: getattr(self.table, name)[picked] for name in ("kv_index", "kv_count")}
        wide = (self.q[picked].double(), self.k.double(), self.v.double())
        expected, _ = block_attention(*wide, **table, kv_len=self.table.kv_len, kernel="reference")
        error = float((out[picked].double() - expected).norm() / expected.norm())
        return error if bool(out.isfinite().all()) else float("nan")


class KernelResult(NamedTuple):
    """Result of one kernel at one block size."""

    kernel: str
    blocks: tuple[int, int]
    problem: str | None = None  # Why it did not run
    error: float = float("nan")
    exact: bool = False
    seconds: float = float("nan")
    flops_per_s: float = float("nan")  # Of the products of active blocks, launch included


@dataclass
class Measured:
    """Times of kernels and attentions, and the constants fitted to them one by one."""

    others: Hardware  # Machine whose constants replace those not measured or too small to measure
    constants: Constants
    kernels: list[KernelResult] = field(default_factory=list)
    dense_s: float = 0.0  # torch's dense attention of a rank's heads
    attentions: list[dict[str, Any]] = field(default_factory=list)  # Whole ones, on all ranks
    residual: dict[str, float] = field(default_factory=dict)  # Largest relative error of the fits, by part

    def fit(
        self,
        part: str,
        names: Sequence[str],
        columns: np.ndarray,
        seconds: np.ndarray,
        explained: np.ndarray | float = 0.0,
    ) -> None:
        """Fits a constant per column; a rate stays the other machine's if its time was too short to measure."""
        values, self.residual[part] = fit(columns, seconds, explained)
        for name, value in zip(names, values, strict=True):
            if not name.endswith("_per_s"):
                self.constants = replace(self.constants, **{name: value})
            elif value > 0:
                self.constants = replace(self.constants, **{name: 1 / value})

    @property
    def exact_kernels(self) -> tuple[str, ...]:
        """The kernels that were exact in all runs, fastest first."""
        ran = [result for result in self.kernels if result.problem is None]
        wrong = {result.kernel for result in ran if not result.exact}
        rates = {
            name: np.mean([result.flops_per_s for result in ran if result.kernel == name])
            for name in dict.fromkeys(result.kernel for result in ran)
            if name not in wrong
        }
        return tuple(sorted(rates, key=rates.__getitem__, reverse=True))

    def hardware(self, name: str, work: Workload) -> Hardware:
        """Returns the machine for the constants file, with the source of each constant."""
        sources = {}
        for key, value in vars(self.constants).items():
            if value is not None:
                same = value == getattr(self.others.constants, key)
                sources[key] = self.others.sources[key] if same else "assumed" if value == 0 else "measured"
        # Rates of the exact kernels by block size
        rates: dict[str, dict[str, float]] = {}
        for result in filter(lambda result: result.exact, self.kernels):
            of_kernel = rates.setdefault(result.kernel, {})
            if (result.kernel, result.blocks) != (work.kernel, work.blocks):
                of_kernel["{}x{}".format(*result.blocks)] = result.flops_per_s
        dense_flops_per_s = 4.0 * work.local_heads * work.tokens**2 * work.head_dim / self.dense_s
        on_gpu = work.device.type == "cuda"
        return Hardware(
            name,
            device_class(work.device),
            str(work.dtype).removeprefix("torch."),
            replace(self.constants, dense_flops_per_s=dense_flops_per_s),
            sources | {"dense_flops_per_s": "measured"},
            kernels={
                key: KernelConstants("measured", flops_by_blocks=by_blocks, head_dim=work.head_dim)
                for key, by_blocks in rates.items()
            },
            exact_kernels=self.exact_kernels,
            multiprocessors=torch.cuda.get_device_properties(work.device).multi_processor_count if on_gpu else None,
            capability=capability_of(work.device) if on_gpu else None,
        )


def measure(work: Workload, others: Hardware) -> Measured:
    """Measures kernels, parts of an attention, and whole attentions; `others` is another machine. Collective."""
    measured = Measured(others, others.constants)
    work.say("measuring kernels against the reference")
    for blocks in sorted({work.blocks} if work.device.type == "cpu" else {work.blocks, (128, 128)}):
        measured.kernels += compare_kernels(work, blocks)
    work.say("measuring dense and sparse attention of one rank, exchanges, and whole attentions")
    _measure_compute(work, measured)
    if work.group.size > 1:
        _measure_exchanges(work, measured)
    _measure_packing(work, measured)
    _measure_attentions(work, measured)
    return measured


def compare_kernels(work: Workload, blocks: tuple[int, int]) -> list[KernelResult]:
    """Runs every kernel for this device on a rank's heads: errors against float64, then times. Collective."""
    rows = Rows.from_mask(work, work.mask(work.local_heads, SPARSE, blocks=blocks))
    needs = KernelRequirements(blocks, work.head_dim, tokens=work.tokens)
    # 1. Problem and error of each kernel on this rank, then the worst over ranks
    tried: list[tuple[str, str | None, float]] = []
    for name, kernel in KERNELS.items():
        if name == "reference" or work.device.type not in kernel.devices:
            continue
        problem, error = kernel.why_unsupported(work.device, work.dtype, needs), float("nan")
        if problem is None:
            try:
                error = rows.error(name)
            except Exception as raised:  # third-party kernels may raise anything; shown in the table
                problem = f"failed: {type(raised).__name__}: {raised}"
        tried.append((name, problem, error))
    results = []
    for of_ranks in zip(*work.gathered(tried), strict=True):
        (name, *_), problems, errors = zip(*of_ranks, strict=True)
        worst = float(np.max(errors))
        exact = worst <= MOST_ERROR[work.dtype] and not KERNELS[name].approximates
        results.append(KernelResult(name, blocks, next(filter(None, problems), None), worst, exact))
    # 2. Times of the kernels that run on all ranks
    ran = [result for result in results if result.problem is None]
    seconds = work.medians([partial(rows.attend, result.kernel) for result in ran])
    timed = {
        result.kernel: result._replace(seconds=float(s), flops_per_s=float(rows.flops / s))
        for result, s in zip(ran, seconds, strict=True)
    }
    return [timed.get(result.kernel, result) for result in results]


def _measure_compute(work: Workload, measured: Measured) -> None:
    """Times attention without exchanges, torch's dense attention, merging and a matrix product.

    One head dim cannot separate softmax from products, so the products' rate includes softmax.
    """
    heads, few = work.local_heads, max(work.blocks[0], work.tokens // 4)
    masks = [*(work.mask(heads, density) for density in _DENSITIES), work.mask(heads, SPARSE, few)]
    rows = [Rows.from_mask(work, mask) for mask in masks]
    q, k, v = (work.random(1, heads, work.tokens, work.head_dim) for _ in range(3))
    width = work.heads * work.head_dim
    left, right = work.random(-(-work.tokens // work.group.size), width), work.random(width, width)
    out, part = (torch.randn(heads * work.tokens // 64, 64, work.head_dim, device=work.device) for _ in range(2))
    lse, part_lse = (torch.randn(out.shape[:2], device=work.device) for _ in range(2))
    actions: list[Action] = [partial(r.attend, work.kernel) for r in rows]
    actions.append(partial(F.scaled_dot_product_attention, q, k, v))
    actions.append(partial(torch.matmul, left, right))
    actions.append(partial(merge_into, out, lse, part, part_lse))
    *seconds, measured.dense_s, linear_s, merge_s = work.medians(actions).tolist()
    measured.constants = replace(
        measured.constants,
        score_s=0.0,
        merge_bytes_per_s=heads * work.tokens * work.head_dim * MERGE_BYTES / merge_s,
        overlap=1.0,
        linear_flops_per_s=2.0 * len(left) * width**2 / linear_s,
        serial_s=0.0,
        network_latency_s=None,
        network_bytes_per_s=None,
    )
    columns = np.array([[r.flops, len(r.q), 1.0] for r in rows])
    measured.fit("compute", ("flops_per_s", "row_s", "launch_s"), columns, np.array(seconds))


def _measure_exchanges(work: Workload, measured: Measured) -> None:
    """Times all-to-alls of several sizes: to all other ranks, and to the next rank only."""
    group, sizes, actions = work.group, [1 << bits for bits in work.sizes], list[Action]()
    before, after = ((group.rank + way) % group.size for way in (-1, 1))
    for size in sizes:
        each = max(1, size // 4 // (group.size - 1))
        splits = [0 if rank == group.rank else each for rank in range(group.size)]
        sent, to_next = (torch.zeros(n, device=work.device) for n in (sum(splits), max(1, size // 4)))
        both = [dist.P2POp(dist.isend, to_next, after), dist.P2POp(dist.irecv, torch.empty_like(to_next), before)]
        actions += [partial(group.all_to_all, sent, splits, splits), partial(_send_and_receive, both)]
    seconds, columns = work.medians(actions), np.array([[1.0, size] for size in sizes])
    for number, part in enumerate(("exchange", "p2p")):
        measured.fit(part, (f"{part}_latency_s", f"{part}_bytes_per_s"), columns, seconds[number::2])


def _send_and_receive(both: list[dist.P2POp]) -> None:
    for transfer in dist.batch_isend_irecv(both):
        transfer.wait()


def _measure_packing(work: Workload, measured: Measured) -> None:
    """Times attentions without active blocks; packing is their time minus exchange, launch and bookkeeping."""
    sizes = [work.tokens // part // work.group.size * work.group.size for part in (1, 2, 4)]
    strategy = Strategy(work.group.size, 1)
    plans, calls = zip(*[work.whole(work.mask(work.heads, 0.0, n), strategy, _PLAIN) for n in sizes], strict=True)
    no_row = replace(measured.constants, row_s=0.0)  # row_s models filling and draining a row's pipeline
    predicted = [work.predicted(plan, no_row) for plan in plans]
    columns = np.array([[p.pack_s * no_row.pack_bytes_per_s, 1.0] for p in predicted])
    explained = np.array([p.exchange_s + p.attention_s for p in predicted])
    measured.fit("call", ("pack_bytes_per_s", "call_s"), columns, work.medians(calls), explained)


def _measure_attentions(work: Workload, measured: Measured) -> None:
    """Times dense Ulysses, and the sparse mask on Ulysses and ring, unbalanced and balanced; fits `overlap`."""
    ulysses, ring = Strategy(work.group.size, 1), Strategy(1, work.group.size)
    dense, sparse = (work.mask(work.heads, density) for density in (1.0, SPARSE))
    strategies = dict.fromkeys((ulysses, ring))
    runs = [(dense, ulysses, _PLAIN), *itertools.product((sparse,), strategies, (_PLAIN, "dbsp"))]
    plans, calls = zip(*[work.whole(*run) for run in runs], strict=True)
    seconds = work.medians(calls).tolist()
    # Overlap of compute and P2P, from the unbalanced ring: 1 means max(compute, P2P), 0 their sum
    for plan, took in zip(plans, seconds, strict=True):
        if plan.strategy.ring > 1 and plan.planner == _PLAIN:
            of_overlap = (replace(measured.constants, overlap=overlap) for overlap in (1.0, 0.0))
            hidden, apart = (work.predicted(plan, constants).total_s for constants in of_overlap)
            if apart > hidden:
                overlap = min(max((apart - took) / (apart - hidden), 0.0), 1.0)
                measured.constants = replace(measured.constants, overlap=overlap)
    measured.attentions = [
        {
            "strategy": str(plan.strategy),
            "planner": plan.planner,
            "rho": plan.rho,
            "density": mask.density,
            "seconds": took,
            "predicted_s": work.predicted(plan, measured.constants).total_s,
        }
        for (mask, *_), plan, took in zip(runs, plans, seconds, strict=True)
    ]


def fit(columns: np.ndarray, seconds: np.ndarray, explained: np.ndarray | float = 0.0) -> tuple[list[float], float]:
    """Fits one coefficient ≥ 0 per column of float64[samples, n], minimizing the sum of squared relative errors.

    Tries every set of nonzero coefficients, which is exact; there are few. Returns the coefficients, and the largest
    relative error of what they and the seconds already `explained` predict.
    """
    relative, target = columns / seconds[:, None], 1 - explained / seconds
    norms = np.maximum(np.linalg.norm(relative, axis=0), np.finfo(float).tiny)
    best, least = np.zeros(columns.shape[1]), np.inf
    for used in itertools.product((False, True), repeat=columns.shape[1]):
        solution = np.linalg.lstsq(relative / norms * used, target, rcond=None)[0] * used
        loss = float(np.linalg.norm(relative / norms @ solution - target))
        if (solution >= 0).all() and loss < least - 1e-9:
            best, least = solution / norms, loss
    return best.tolist(), float(np.abs(relative @ best - target).max())


def _tables(title: str, measured: Measured) -> list[TextTable]:
    rows: list[tuple[str, ...]] = [("torch, dense", "", f"{measured.dense_s * 1e3:.2f}", "", "", "")]
    for k in measured.kernels:
        numbers = (f"{k.seconds * 1e3:.2f}", f"{k.flops_per_s / 1e12:.3g}", f"{k.error:.1e}")
        verdict = k.problem or ("exact" if k.exact else "not exact")
        rows.append((k.kernel, "×".join(map(str, k.blocks)), *(("–",) * 3 if k.problem else numbers), verdict))
    names = ("kernel", "blocks", "ms", "TFLOP/s", "error", "verdict")
    caption = f"one rank's heads, density {SPARSE:g}; order of kernel: auto: "
    caption += ", ".join(measured.exact_kernels) or "none"
    kernels = TextTable(title, names, rows, caption, left=("kernel", "verdict"))
    dense_s, rows = measured.attentions[0]["seconds"], []
    for run in measured.attentions:
        mask = "dense" if run["density"] == 1 else f"density {run['density']:.2f}"
        times = f"{run['seconds'] * 1e3:.2f}", f"{run['predicted_s'] * 1e3:.2f}", f"{dense_s / run['seconds']:.2f}×"
        rows.append((mask, run["strategy"], run["planner"], f"{run['rho']:.3f}", *times))
    columns = ("mask", "strategy", "planner", "ρ_s", "ms", "predicted", "over dense")
    caption = "ρ_s: slowest rank over mean; predicted: by the measured constants"
    left = ("mask", "strategy", "planner")
    return [kernels, TextTable("whole attentions on all ranks", columns, rows, caption, left=left)]

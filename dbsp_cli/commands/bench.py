"""`dbsp bench`: a model's attention measured on this machine, for `strategy: auto` and `kernel: auto`."""

from __future__ import annotations

import datetime
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from dbsp_cli.generate.ranks import RankInfo
from dbsp_cli.measure import SPARSE, Measured, Rows, Workload, measure
from dbsp_cli.output import (
    PATH,
    JsonFlag,
    TextTable,
    print_json,
    print_tables,
    require_picture_path,
)
from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.config import default_config
from dbsp_core.cost.machine import (
    SHIPPED,
    Hardware,
    KernelConstants,
    device_class,
    load_hardware,
    measured_file,
    save_hardware,
)
from dbsp_core.models.signature import ModelSignature
from dbsp_core.models.table import MODEL_SPECS, find_model_spec, published_model, signature_of_model, unknown_model
from dbsp_core.utils.errors import in_number
from dbsp_core.utils.files import in_bytes, require_file_path, write_atomically
from dbsp_core.utils.process import NOTICE, installed_version
from dbsp_kernels import KERNELS, KernelRequirements, choose_kernel

MOST_ERROR = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Relative error against float64 of a kernel that is exact."""
_ON_CPU = 8, 2048
"""Most heads and tokens on a CPU, where measuring is for trying out."""
_WRONG = 0.5
"""Relative error of a prediction above which the user is warned."""


def bench_command(
    model: Annotated[str, typer.Argument(help=f"Whose attention: {', '.join(MODEL_SPECS)}, or a folder.")],
    out: Annotated[
        Path | None, typer.Option(help="Constants file to write; default: where runs here look for it.", **PATH)
    ] = None,
    picture: Annotated[Path | None, typer.Option(help="PNG to write.", **PATH)] = None,
    as_json: JsonFlag = False,
) -> None:
    """Measure a model's attention here: kernels, exchanges, balance. strategy: auto and kernel: auto then use it.

    One process measures one GPU; for all of a node: torchrun --nproc-per-node 8 -m dbsp_cli bench MODEL

    Started by torchrun, srun or MPI, it joins the ranks that are there.
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
    require_picture_path(picture, {"--out": out})
    with nullcontext() if rank_info is None else process_group(device):
        work, shapes = _workload(model, identity, device, SequenceGroup.from_group())
        found = _measured(model, work, shapes, out.stem)
    if rank_info is None or rank_info.local == 0:  # nodes may have folders of their own
        save_hardware(out, found.hardware, found.record)
    if work.group.rank:
        return
    if picture is not None:
        write_atomically(picture, _picture(found))
    if as_json:
        print_json(**_report(found, out))
    else:
        print_tables(_tables(found))
    for warning in found.warnings:
        print(f"{NOTICE}{warning}", file=sys.stderr)
    print(f"wrote {out}", file=sys.stderr)


@dataclass(frozen=True)
class Bench:
    """Everything that was measured of one model.

    Attributes:
        others: The hardware profile whose constants replace what was not measured.
        record: Text in the file about its origin.
    """

    model: str
    work: Workload
    kernels: list[KernelResult]
    measured: Measured
    hardware: Hardware
    others: Hardware
    record: dict[str, Any]

    @property
    def warnings(self) -> list[str]:
        """Lines that the user should read before using the constants."""
        said = []
        if self.work.group.size == 1:
            said.append(
                f"one rank exchanges nothing: rates of exchanges are those of {self.others.name}, not measured"
            )
        worst = max(abs(one.predicted_s / one.seconds - 1) for one in self.measured.attentions)
        if worst > _WRONG:
            said.append(
                f"these constants predict a measured attention wrong by {worst:.0%}: something else ran here; "
                "measure again"
            )
        return said


def _workload(
    model: str, identity: ModelSignature, device: torch.device, group: SequenceGroup
) -> tuple[Workload, list[tuple[int, int]]]:
    """Returns the model's attention, cut down on a CPU, and sizes of blocks for which kernels are compared."""
    spec = find_model_spec(model) or published_model(identity)
    _, heads, head_dim, _ = identity.sizes
    tokens = _ON_CPU[1] if spec is None else spec.tokens
    mask = default_config(identity, spec).mask
    blocks = getattr(mask, "block_q", 64), getattr(mask, "block_k", 64)
    dtype, sizes, repeats, shapes = torch.bfloat16, range(16, 29, 3), 9, {blocks, (128, 128)}
    if device.type == "cpu":
        heads, tokens = min(heads, _ON_CPU[0]), min(tokens, _ON_CPU[1])
        dtype, sizes, repeats, shapes = torch.float32, range(12, 23, 3), 5, {blocks}
    kernel = choose_kernel("auto", device, dtype).name
    sent = tuple(1 << bits for bits in sizes)
    return Workload(heads, head_dim, tokens, blocks, kernel, dtype, device, group, sent, repeats), sorted(shapes)


def _measured(model: str, work: Workload, shapes: Sequence[tuple[int, int]], name: str) -> Bench:
    """Measures everything, and labels the constants. Collective."""

    def say(what: str) -> None:
        if work.group.rank == 0:
            print(f"{NOTICE}measuring {what}", file=sys.stderr, flush=True)

    # 1. Kernels, and everything else.
    say("kernels against the reference")
    kernels = [one for blocks in shapes for one in compare_kernels(work, blocks)]
    device = device_class(work.device)
    others = _shipped_like(device, work.device.type)
    measured = measure(work, others.constants, say)
    # 2. The machine as runs read it.
    known, labels = measured.constants, {}
    for key, value in vars(known).items():
        if value is not None:
            same = value == getattr(others.constants, key)
            labels[key] = others.sources[key] if same else "assumed" if value == 0 else "measured"
    dtype = str(work.dtype).removeprefix("torch.")
    rates, exact = kernel_rates(kernels, work), exact_kernels(kernels)
    hardware = Hardware(name, device, dtype, known, labels, kernels=rates, exact_kernels=exact)
    record = {
        "versions": {
            "dbsp-attention": installed_version("dbsp-attention") or "not installed",
            "torch": str(torch.__version__),
            "kernel": work.kernel,
        },
        "residuals": {part: round(one, 4) for part, one in measured.residual.items()},
        "date": datetime.date.today().isoformat(),
        "notes": f"dbsp bench {model}: {_size(work)}. Errors of kernels: "
        + "; ".join(f"{one.kernel} {one.blocks} {one.problem or f'{one.error:.1e}'}" for one in kernels),
    }
    return Bench(model, work, kernels, measured, hardware, others, record)


def _size(work: Workload) -> str:
    ranks = in_number(work.group.size, "rank")
    return f"{ranks}, {work.heads} heads of {work.head_dim}, {work.tokens:,} tokens, blocks of {_blocks(work.blocks)}"


def _blocks(blocks: tuple[int, int]) -> str:
    return f"{blocks[0]}×{blocks[1]}"


def _shipped_like(device: str, kind: str) -> Hardware:
    """Returns the shipped machine with this device, else an H100 or a CPU."""
    shipped = [load_hardware(path.stem) for path in sorted(SHIPPED.glob("*.yaml"))]
    usual = load_hardware("h100" if kind == "cuda" else "cpu-demo")
    return next((one for one in shipped if one.device == device), usual)


@dataclass(frozen=True)
class KernelResult:
    """One kernel at one size of blocks.

    Attributes:
        problem: Reason why it did not run, or None.
        speed: Over the first kernel that was exact with these blocks.
        flops_per_s: Rate of the products of active blocks, launch included.
    """

    kernel: str
    blocks: tuple[int, int]
    problem: str | None = None
    error: float = float("nan")
    exact: bool = False
    seconds: float = float("nan")
    speed: float = 0.0
    flops_per_s: float = float("nan")


def compare_kernels(work: Workload, blocks: tuple[int, int]) -> list[KernelResult]:
    """Runs every kernel for this device on a rank's heads: errors against float64, then times. Collective."""
    mask = work.mask(work.own_heads, SPARSE, blocks=blocks)
    rows, flops = Rows.from_mask(work, mask), 4.0 * int(mask.bits.sum()) * blocks[0] * blocks[1] * work.head_dim
    needs = KernelRequirements(blocks, work.head_dim, tokens=work.tokens)
    named = [name for name, one in KERNELS.items() if name != "reference" and work.device.type in one.devices]
    found = {}
    tried = work.gathered([_tried(rows, name, work, needs) for name in named])
    for name, *by_rank in zip(named, *tried, strict=True):
        problem = next((said for said, _ in by_rank if said), None)
        error = float(np.max([error for _, error in by_rank]))
        exact = error <= MOST_ERROR[work.dtype] and not KERNELS[name].approximates
        found[name] = KernelResult(name, blocks, problem, error, exact)
    runs = {name: lambda name=name: rows.attend(name) for name, one in found.items() if one.problem is None}
    seconds = work.medians(runs)
    first = next((seconds[name] for name in seconds if found[name].exact), float("nan"))
    timed = {
        name: replace(found[name], seconds=took, speed=first / took, flops_per_s=flops / took)
        for name, took in seconds.items()
    }
    return list((found | timed).values())


def _tried(rows: Rows, name: str, work: Workload, needs: KernelRequirements) -> tuple[str | None, float]:
    """Returns why a kernel does not run here, or None, and its error."""
    reason = KERNELS[name].why_unsupported(work.device, work.dtype, needs)
    if reason is not None:
        return reason, float("nan")
    try:
        return None, rows.error(name)
    except Exception as error:  # other projects' kernels raise anything: it is what the table says of them
        return f"failed: {type(error).__name__}: {error}", float("nan")


def exact_kernels(results: Sequence[KernelResult]) -> tuple[str, ...]:
    """Returns the kernels that were exact wherever they ran, the fastest first."""
    speeds: dict[str, list[float]] = {}
    for one in results:
        if one.problem is None:
            speeds.setdefault(one.kernel, []).append(one.speed if one.exact else float("nan"))
    exact = {name: float(np.mean(found)) for name, found in speeds.items() if np.isfinite(found).all()}
    return tuple(sorted(exact, key=lambda name: -exact[name]))


def kernel_rates(results: Sequence[KernelResult], work: Workload) -> dict[str, KernelConstants]:
    """Returns the rates of the exact kernels by blocks, but for those that the machine's constants are fitted to."""
    rates: dict[str, dict[str, float]] = {}
    for one in results:
        if one.exact and (one.kernel, one.blocks) != (work.kernel, work.blocks):
            rates.setdefault(one.kernel, {})[f"{one.blocks[0]}x{one.blocks[1]}"] = one.flops_per_s
    return {name: KernelConstants("measured", flops_by_blocks=found) for name, found in rates.items()}


def _tables(found: Bench) -> list[TextTable]:
    """Returns the tables of kernels, of one rank's attention, of exchanges and of whole attentions."""
    work, measured = found.work, found.measured
    rows: list[tuple[str, ...]] = []
    for one in found.kernels:
        numbers = (f"{one.seconds * 1e3:.2f}", f"{one.speed:.2f}×", f"{one.error:.1e}")
        verdict = one.problem or ("exact" if one.exact else "not exact")
        rows.append((one.kernel, _blocks(one.blocks), *(("–",) * 3 if one.problem else numbers), verdict))
    order = ", ".join(found.hardware.exact_kernels) or "none"
    names: tuple[str, ...] = ("kernel", "blocks", "ms", "speed", "error", "verdict")
    title = f"{found.model} on {found.hardware.device}, measured: {_size(work)}"
    tables = [TextTable(title, names, rows, f"kernel: auto takes, in this order: {order}", left=("kernel", "verdict"))]
    rows = [("dense, torch", f"{measured.dense_s * 1e3:.2f}", "1.00×")]
    rows += [
        (f"density {density:g}, {work.kernel}", f"{took * 1e3:.2f}", f"{measured.dense_s / took:.2f}×")
        for density, took in measured.by_density.items()
    ]
    tables.append(
        TextTable("attention of one rank's heads", ("attention", "ms", "over dense"), rows, left=("attention",))
    )
    if measured.exchanges:
        pairs = [measured.exchanges[part] for part in ("exchange", "p2p")]
        rows = [(in_bytes(size), *(f"{size / one[size] / 1e9:.2f}" for one in pairs)) for size in work.sizes]
        tables.append(TextTable("exchanges, GB/s", ("bytes a rank sends", "all-to-all", "to one rank"), rows))
    dense_s = measured.attentions[0].seconds
    rows = []
    for run in measured.attentions:
        mask = "dense" if run.density == 1 else f"density {run.density:.2f}"
        times = f"{run.seconds * 1e3:.2f}", f"{run.predicted_s * 1e3:.2f}", f"{dense_s / run.seconds:.2f}×"
        rows.append((mask, str(run.plan.strategy), run.plan.planner, f"{run.plan.rho:.3f}", *times))
    names = ("mask", "strategy", "planner", "ρ_s", "ms", "predicted", "over dense")
    caption = "ρ_s: slowest rank over mean; predicted: by the constants that are written"
    tables.append(
        TextTable("whole attentions on all ranks", names, rows, caption, left=("mask", "strategy", "planner"))
    )
    return tables


def _report(found: Bench, out: Path) -> dict[str, Any]:
    """Returns what --json prints."""
    measured = found.measured
    attentions = [
        {"strategy": str(one.plan.strategy), "planner": one.plan.planner, "density": one.density, "rho": one.plan.rho}
        | {"seconds": one.seconds, "predicted_s": one.predicted_s}
        for one in measured.attentions
    ]
    return {
        "model": found.model,
        "ranks": found.work.group.size,
        "file": str(out),
        "hardware": asdict(found.hardware) | found.record,
        "kernels": [
            {key: None if value != value else value for key, value in vars(one).items()} for one in found.kernels
        ],
        "dense_s": measured.dense_s,
        "by_density": measured.by_density,
        "exchanges": measured.exchanges,
        "attentions": attentions,
    }


def _picture(found: Bench) -> bytes:
    """Draws a PNG: one rank's attention over density, rates of exchanges, whole attentions."""
    from matplotlib.figure import Figure

    work, measured = found.work, found.measured
    figure = Figure(figsize=(13, 4), layout="constrained")
    figure.suptitle(f"{found.model}: {_size(work)} ({found.hardware.device})")
    over_density, exchanges, whole = figure.subplots(1, 3)
    over_density.plot(
        [*measured.by_density], [took * 1e3 for took in measured.by_density.values()], "o-", label=work.kernel
    )
    over_density.axhline(measured.dense_s * 1e3, color="grey", linestyle="--", label="dense, torch")
    over_density.set(title="attention of one rank", xlabel="share of active blocks", ylabel="ms", ylim=(0, None))
    over_density.legend()
    for part, label in (("exchange", "all-to-all"), ("p2p", "to one rank")):
        rates = [(size, size / took / 1e9) for size, took in measured.exchanges.get(part, {}).items()]
        exchanges.plot(*zip(*rates, strict=True), "o-", label=label) if rates else None
    title = "exchanges" if measured.exchanges else "exchanges: one rank has none"
    exchanges.set(title=title, xlabel="bytes that a rank sends", ylabel="GB/s", xscale="log")
    if measured.exchanges:
        exchanges.legend()
    kinds = ["dense" if one.density == 1 else "sparse" for one in measured.attentions]
    plans = [one.plan for one in measured.attentions]
    names = [f"{kind} {plan.strategy}\n{plan.planner}" for kind, plan in zip(kinds, plans, strict=True)]
    whole.barh(names, [one.seconds * 1e3 for one in measured.attentions])
    whole.invert_yaxis()
    whole.set(title="whole attentions", xlabel="ms")
    content = BytesIO()
    figure.savefig(content, format="png", dpi=110)
    return content.getvalue()

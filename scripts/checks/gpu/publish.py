"""Writes what the GPU suite measured to constants, results and pages: scripts/gpu_suite --publish FOLDER.

- constants that `dbsp bench` measured, to the file in configs/hardware for this device;
- all rows as a CSV in docs/results, with an entry in evidence.yaml; seconds.csv, modelled by these constants;
- on pages, what stands between `<!-- measured NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from dbsp_core.cost.machine import SHIPPED, Hardware, KernelConstants, load_hardware, save_hardware
from dbsp_core.utils.errors import UserError
from dbsp_core.utils.yaml_file import read_settings
from scripts.checks.gpu.machine import output_of, sources_fingerprint
from scripts.checks.gpu.results import RESULTS, Key, Outcome, read_results
from scripts.checks.gpu.suite import REPO
from scripts.reproduce import seconds
from scripts.results.result import Row as Line
from scripts.results.result import write_csv

MARKED = re.compile(r"<!-- measured ([\w-]+) -->.*?<!-- end -->", re.DOTALL)
PAGES = ("README.md", "docs/kernels.md")
MODELS = {"wan2.1-t2v-14b": "Wan2.1 14B", "cogvideox1.5-5b": "CogVideoX1.5 5B"}
BLOCKS, DENSITIES = ("128×64", "64×64", "128×128"), ("0.2", "0.4", "0.7", "1.0")
MASKS = ("static", "predicted")
_GAIN = "gain over best dense"


@dataclass(frozen=True)
class Published:
    """Outcomes of one device, of one version of the sources."""

    name: str  # of the machine in configs/hardware
    device: str
    commit: str  # at which the suite ran
    date: str
    outcomes: dict[Key, Outcome]

    @classmethod
    def read(cls, folder: Path) -> Published:
        """Reads a folder of the suite. Raises UserError for a dry run, or if it is not known what was measured."""
        if not (folder / RESULTS).is_file():
            raise UserError(f"{folder / RESULTS} does not exist; run scripts/gpu_suite --out {folder}")
        machine, outcomes = read_results(folder / RESULTS)
        if machine["how"] != "GPU":
            raise UserError(f"{folder / RESULTS} is of a {machine['how']}; run scripts/gpu_suite on a GPU")
        commit = str(machine["commit"])
        if machine["sources"] == sources_fingerprint():
            commit = output_of(["git", "-C", str(REPO), "rev-parse", "HEAD"])
        elif commit == "unknown" or commit.endswith("-dirty"):
            raise UserError(f"{folder / RESULTS} is of other sources at commit {commit}; run scripts/gpu_suite again")
        outcomes = {key: outcome for key, outcome in outcomes.items() if outcome.sources == machine["sources"]}
        device = machine["devices"][0]
        return cls(machine_name(device), device, commit[:8], machine["date"].partition(" ")[0], outcomes)

    def value(self, case: str, what: str) -> float | None:
        """Returns the value of a row, or None if there is none."""
        rows = (row for key, outcome in self.outcomes.items() if key.case == case for row in outcome.rows)
        return next((row.value for row in rows if row.what == what), None)

    def rate(self, blocks: str, density: str) -> float | None:
        """Returns TFLOP/s of the loop in use, whose error is the first row of its case."""
        outcome = self.outcomes.get(Key("rates", _case(blocks)))
        in_use = outcome.rows[0].what.removeprefix("error of ") if outcome and outcome.rows else ""
        return self.value(_case(blocks), f"{in_use}, density {density}")

    @property
    def file(self) -> str:
        return f"gpu-{self.name}"

    @property
    def verdict(self) -> str:
        """Says how many checks were right."""
        right = sum(outcome.state == "ended" and outcome.correct for outcome in self.outcomes.values())
        wrong = sum(not outcome.correct for outcome in self.outcomes.values())
        return f"{right} cases right, {wrong} wrong"


def publish(folder: Path) -> int:
    """Writes everything. Returns the exit status."""
    try:
        published = Published.read(folder)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    written = [write_hardware(published)]
    videos = list(seconds.rows())  # modelled by these constants
    written += write_results(published, videos)
    texts = {"status": status(published), "kernels": kernels_table(published), "seconds": seconds_table(videos)}
    written += write_pages(texts)
    print("wrote", *(path.relative_to(REPO) for path in written), sep="\n  ")
    print(
        f"commit these, then write that commit into the entry of seconds.csv in evidence.yaml  ({published.verdict})"
    )
    return 0


def machine_name(device: str) -> str:
    """Returns the name of the shipped machine with this device, or a new one."""
    known = {load_hardware(path.stem).device: path.stem for path in sorted(SHIPPED.glob("*.yaml"))}
    return known.get(device) or re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def write_hardware(published: Published) -> Path:
    """Replaces the constants that were measured, with their labels."""
    path = SHIPPED / f"{published.name}.yaml"
    before = load_hardware(published.name if path.is_file() else "h100")
    rows = [row for key, outcome in published.outcomes.items() if key.part == "constants" for row in outcome.rows]
    # 1. Constants of the model.
    names = vars(before.constants).keys() - {"linear_flops_per_s"}  # derived from whole videos; one product says less
    measured = {row.what: float(f"{row.value:.3e}") for row in rows if row.what in names}
    constants = replace(before.constants, **measured)
    sources = {**before.sources, **dict.fromkeys(measured, "measured")}
    # 2. Rates of kernels by blocks, and the head size of all of them.
    by_kernel: dict[str, dict[str, float]] = {}
    head_dims = {row.what.removesuffix(" head_dim"): int(row.value) for row in rows if row.what.endswith(" head_dim")}
    for row in rows:
        if found := re.fullmatch(r"(\S+) (\d+x\d+) flops_per_s", row.what):
            by_kernel.setdefault(found[1], {})[found[2]] = float(f"{row.value:.3e}")
    kernels = dict(before.kernels)
    for name in by_kernel | head_dims:
        known = kernels.get(name, KernelConstants("measured"))
        changed = by_kernel.get(name, known.flops_by_blocks), head_dims.get(name, known.head_dim)
        kernels[name] = replace(known, source="measured", flops_by_blocks=changed[0], head_dim=changed[1])
    hardware: Hardware = replace(
        before,
        name=published.name,
        device=published.device,
        constants=constants,
        sources=sources,
        kernels=kernels,
    )
    earlier = str(read_settings(path, "hardware file").values.get("notes", "")) if path.is_file() else ""
    others = re.sub(r"^Measured on .*? The others: ", "", earlier, flags=re.DOTALL)
    named = ", ".join(sorted(measured))
    notes = f"Measured on one GPU by scripts/gpu_suite at commit {published.commit}: {named}. The others: {others}"
    save_hardware(path, hardware, {"date": published.date, "notes": notes})
    return path


def write_results(published: Published, videos: list[Line]) -> Iterator[Path]:
    """Writes gpu-NAME.csv with its entry in evidence.yaml, and seconds.csv. Yields their paths."""
    lines = [
        Line(**key._asdict(), **vars(row), state=outcome.state)
        for key, outcome in published.outcomes.items()
        for row in outcome.rows
    ]
    results = REPO / "docs" / "results"
    write_csv(published.file, lines, results)
    yield results / f"{published.file}.csv"
    evidence = results / "evidence.yaml"
    entry = f"""
- files: [{published.file}.csv]
  what: checks and measurements of scripts/gpu_suite on one {published.device}
  command: scripts/gpu_suite --out FOLDER, then scripts/gpu_suite --publish FOLDER
  how: [measured]
  machine: {published.device}
  commit: "{published.commit}"
  sources: [kernels, dbsp_core/runtime, dbsp_core/comm, scripts/checks/gpu]
"""
    others = re.sub(rf"\n- files: \[{published.file}\.csv\]\n(  .*\n)+", "", evidence.read_text(encoding="utf-8"))
    evidence.write_text(others.rstrip("\n") + "\n" + entry, encoding="utf-8")
    yield evidence
    write_csv("seconds", videos, results)
    yield results / "seconds.csv"


def write_pages(texts: dict[str, str]) -> Iterator[Path]:
    """Replaces marked places by their texts. Yields the pages that changed."""
    for name in PAGES:
        page = REPO / name
        before = page.read_text(encoding="utf-8")
        after = MARKED.sub(lambda place: f"<!-- measured {place[1]} -->{texts[place[1]]}<!-- end -->", before)
        if after != before:
            page.write_text(after, encoding="utf-8")
            yield page


def status(published: Published) -> str:
    return (
        f"\n- **On a GPU**: {published.verdict}, on one {published.device} "
        f"([measured](docs/results/{published.file}.csv)). Not yet run on several.\n"
    )


def kernels_table(published: Published) -> str:
    """Returns rates by blocks (rows) and density (columns)."""
    rows = []
    for blocks in BLOCKS:
        cells = []
        for density in DENSITIES:
            rate, gain = published.rate(blocks, density), published.value(_case(blocks), f"{_GAIN}, density {density}")
            if rate is not None and gain is not None:
                cells.append(f"{rate:.0f}, {gain:.2f}×")
        if len(cells) == len(DENSITIES):
            rows.append(f"| {blocks} | {' | '.join(cells)} |\n")
    head = " | ".join(["blocks", f"density {DENSITIES[0]}", *DENSITIES[1:]])
    return (
        f"\n`triton` on one {published.device}, 5 heads of 75,600 tokens (Wan2.1-14B on 8 GPUs), bfloat16, measured "
        f"at\ncommit {published.commit} ([all rows](results/{published.file}.csv)): TFLOP/s on active blocks, and "
        f"times as fast as the\nfastest dense kernel.\n\n| {head} |\n|{'---|' * (1 + len(DENSITIES))}\n"
        f"{''.join(rows)}\n{balance_lines(published)}"
    )


def balance_lines(published: Published) -> str:
    """Returns what balance gains on the device, and what a call costs on device and host."""
    gains: list[str] = []
    calls: dict[str, dict[str, str]] = {}  # by case and mask
    for key, outcome in published.outcomes.items():
        values = {row.what: row.value for row in outcome.rows}
        if key.part == "balance" and "contiguous / dbsp" in values:
            before, after = (values[f"{planner}: slowest / mean, in time"] for planner in ("contiguous", "dbsp"))
            gains.append(
                f"- {key.case}: the slowest rank's attention takes {values['contiguous / dbsp']:.2f} times as long\n"
                f"  split contiguously as balanced; slowest over mean {before:.3f} → {after:.3f}.\n"
            )
        elif key.part == "steady" and "on the device" in values:
            case, _, mask = key.case.rpartition(", ")
            calls.setdefault(case, {})[mask] = f"{values['on the device']:.2f}, {values['on the host']:.2f}"
    head = "| steady call of a rank of 8 | static mask: ms on device, host | predicted mask |\n|---|---|---|\n"
    lines = [f"| {case} | {' | '.join(of.get(mask, '–') for mask in MASKS)} |\n" for case, of in calls.items()]
    return "".join(
        [*(gains and ["Each rank of a plan for 8 GPUs alone, one after another:\n\n", *gains, "\n"]), head, *lines]
    )


def seconds_table(videos: list[Line]) -> str:
    """Returns README's table: masks that are faster than dense attention, on each machine that was measured."""
    machines = [name for name in seconds.MACHINES if load_hardware(name).measured]
    columns = ["model, video", "mask", "density", "GPU", "dense", "equal split", "db-SP"]
    lines = [f"| {' | '.join([*columns, 'by sparsity', 'by balance'])} |", "|---" * 9 + "|"]
    shown = dict.fromkeys(("model", "mask"), "")
    for row in videos:
        if row.machine not in machines or row.dbsp_s >= row.dense_s:
            continue
        title, mask = f"{MODELS[row.model]}, {row.size}, {row.steps} steps", f"`{row.mask}`"
        mask += f", {row.dense_steps} steps dense" if row.dense_steps else ""
        cells = [title, mask, f"{row.density:.2f}, {row.origin}"]
        if (title, mask) == (shown["model"], shown["mask"]):
            cells = ["", "", ""]
        elif title == shown["model"]:
            cells[0] = ""
        shown = {"model": title, "mask": mask}
        cells += [row.machine.upper(), f"{row.dense_s:.0f}", f"{row.blind_s:.0f}", f"**{row.dbsp_s:.0f}**"]
        cells += [f"{row.by_sparsity:.2f}×", f"{row.by_balance:.2f}×"]
        lines.append(re.sub(r"\|  (?=\|)", "| ", f"| {' | '.join(cells)} |"))
    return "\n" + "\n".join(lines) + "\n"


def _case(blocks: str) -> str:
    return f"14B, {blocks}, D 128, bfloat16"

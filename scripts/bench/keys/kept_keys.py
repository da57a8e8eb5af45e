"""What kept keys ask of the host, and what they cost when they are old.

    python -m scripts.bench.keys.kept_keys host     # measured: milliseconds of one core, for what a mask adds
    python -m scripts.bench.keys.kept_keys older    # modelled: times with the keys of an earlier step

Masks are synthetic ones of Wan2.1-14B at 720p.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from dbsp_core.comm.route_building import build_fetch
from dbsp_core.layout.sequence_layout import SequenceLayout
from dbsp_core.layout.strategy import Strategy
from dbsp_core.planning.kept_keys import KeptKeys
from dbsp_core.planning.key_chunks import needed_by
from dbsp_core.planning.plan import make_plan
from dbsp_core.planning.row_owners import places_of
from dbsp_core.runtime.rank_plan import RankPlan
from scripts.bench.keys.predicted_masks import MACHINES, SYNTHETIC, Machine, fastest, synthetic


def print_host_times() -> None:
    """Milliseconds of the host for what a step's mask adds, and for a route anew: medians of nine, on one core."""
    for (preset, density), strategy in itertools.product(SYNTHETIC[:2], (Strategy(8, 2), Strategy(8, 4))):
        last, now = synthetic(preset, density)
        layout = SequenceLayout.named("striped", now.grid, strategy)
        plan = make_plan(last, strategy, layout=layout, compare=False, keys="kept")
        keys, part = plan.assignment.keys, RankPlan.of(plan.assignment, layout, 0)
        assert isinstance(keys, KeptKeys)
        added = keys.with_mask(plan.assignment, now).added
        assert added is not None
        own, rows = places_of(added[0]), part.rows
        exchange = _median_ms(lambda: build_fetch(plan.assignment, layout, 0, added))  # noqa: B023
        tables = _median_ms(lambda: rows.table_layout([own]))  # noqa: B023
        whole = _median_ms(lambda: RankPlan.of(plan.assignment, layout, 0))  # noqa: B023
        of_added = f"exchange {exchange:.2f}, tables' layout {tables:.2f}"
        print(f"{preset} {density} {strategy}: {of_added}; all anew {whole:.2f} (measured)")


def print_times_of_older_keys() -> None:
    """Modelled times with the keys of up to eight steps before, over those with this step's, by how many differ."""
    for preset, density in SYNTHETIC[:2]:
        first, *later = synthetic(preset, density, (7, 8, 9, 10, 11, 12, 15))
        for setting, strategy in zip(MACHINES[1:4], (Strategy(8, 2), Strategy(8, 4), Strategy(4, 2)), strict=True):
            machine, layout = Machine.of(*setting), SequenceLayout.named("striped", first.grid, strategy)
            plan = fastest(first, "kept", strategy, layout, machine)
            keys, found = plan.assignment.keys, []
            assert isinstance(keys, KeptKeys)
            for mask in later:
                needed = needed_by(plan.assignment, mask)
                both = (replace(one, added=needed & ~one.sent) for one in (keys, replace(keys, sent=needed)))
                old, new = (machine.seconds(plan.with_keys(one, mask), layout) for one in both)
                differ = (needed != keys.sent).sum(axis=(1, 2)).max() * len(needed) / keys.sent.sum()
                found.append(f"{differ:.1%} {old / new:.3f}")
            print(f"{density} {setting[0]} {setting[1]} x {setting[2]} {strategy}:", ", ".join(found), "(modelled)")


def _median_ms(call: Callable[[], object]) -> float:
    def seconds() -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    return sorted(seconds() for _ in range(9))[4] * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("host", "older"))
    torch.set_num_threads(1)
    {"host": print_host_times, "older": print_times_of_older_keys}[parser.parse_args().what]()


if __name__ == "__main__":
    main()

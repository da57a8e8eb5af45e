"""Fits a800 and h800 (configs/hardware) to half of what the db-SP paper's authors measured; prints constants.

What they are fitted to is chosen by a seed; fig8 and fig10 show both halves beside the model, with the constants of
the hardware files and what stands here.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import numpy as np
from scipy.optimize import least_squares

from dbsp_core.cost.machine import Constants, load_hardware
from scripts.reproduce.authors.measured import PROFILE, STRATEGIES, Bar, attention_ms, bars, fitted_half
from scripts.reproduce.authors.runs import Unknowns, attention_s, bar_attention_s, dense_s, other_s

WAN, COGVIDEOX = "wan2.1-t2v-14b", "cogvideox1.5-5b"
MACHINES = ("a800", "h800")
UNKNOWNS = Unknowns({WAN: 0.8795, COGVIDEOX: 0.4873}, tile_cost=1.4166, reordered_cost=0.626)
"""As this program finds them."""
FIRST_LAYER, GROWTH = 0.0943, 0.2943e-3
"""Fig. 10's masks, as this program finds them: density of the first layer, and seconds by which the heaviest head's
blocks take longer from one layer to the next on one GPU."""


def profile_rates(model_tokens: int = 75600, width: int = 5120) -> dict[str, float]:
    """What Eq. 4's profile says of an A800: all-to-all and dense attention, bytes and FLOP per second."""
    tensor = model_tokens * width * 2 / 8
    exchanged = [4 * tensor * (x - 1) / x / (ms / 1e3) for x, ms in PROFILE["all_to_all_ms"].items()]
    flops = 4 * model_tokens**2 * width / 8 / (PROFILE["dense_ms"] / 1e3)
    return {"exchange_bytes_per_s": float(np.median(exchanged)), "flops_per_s": flops}


def fit_layers(known: Constants) -> tuple[float, float, float]:
    """(launch_s, blocks_s, growth_s) of the layer times of the fitted half of the layers.

    T = exchange + packing + merges + y · launch + blocks + layer · growth · x / 8: what a layer has more than the
    first is on one Ulysses rank, that is, in one head, and is shared by that rank's ring.
    """
    times, rows, rest = attention_ms().mean(axis=0) / 1e3, [], []
    for layer in np.flatnonzero(fitted_half(len(times))):
        for strategy, measured in zip(STRATEGIES, times[layer], strict=True):
            beside = attention_s(WAN, strategy, replace(known, launch_s=0.0), 0.0)
            rows.append(np.array([strategy.ring, 1.0, layer * strategy.ulysses / 8]) / measured)
            rest.append((measured - beside) / measured)
    launch_s, blocks_s, growth_s = np.linalg.lstsq(np.array(rows), np.array(rest), rcond=None)[0]
    return float(launch_s), float(blocks_s), float(growth_s)


def fit_bars(known: dict[str, Constants], given: list[Bar]) -> tuple[dict[str, Constants], Unknowns]:
    """The 8-bit kernels' constants by machine, and what else the bars need: least squares on relative errors."""

    def unpack(x: np.ndarray) -> tuple[dict[str, Constants], Unknowns]:
        a_rate, h_rate, a_call, h_call, h_launch, score, wan, cog, tile, reordered = x
        rates = {"a800": (a_rate, a_call, known["a800"].launch_s), "h800": (h_rate, h_call, h_launch / 1e3)}
        machines = {
            name: replace(
                known[name],
                flops_per_s=rate * 1e12,
                call_s=call / 1e3,
                launch_s=launch_s,
                score_s=score * 256 / (rate * 1e12),
            )
            for name, (rate, call, launch_s) in rates.items()
        }
        return machines, Unknowns({WAN: wan, COGVIDEOX: cog}, tile, reordered)

    def errors(x: np.ndarray) -> np.ndarray:
        machines, unknowns = unpack(x)
        found = [end_to_end_s(bar, machines[bar.machine], unknowns) / bar.end_to_end_s for bar in given]
        return np.array(found) - 1

    start = [300.0, 600.0, 8.0, 6.0, 0.3, 0.3, 0.8, 0.5, 1.4, 0.6]
    bounds = ([50, 50, 0, 0, 0, 0, 0.1, 0.1, 1, 0.2], [2000, 2000, 50, 50, 2, 3, 1, 1, 2, 1])
    return unpack(least_squares(errors, start, bounds=bounds, x_scale=np.array(start), loss="soft_l1", f_scale=0.03).x)


def end_to_end_s(bar: Bar, known: Constants, unknowns: Unknowns) -> float:
    return other_s(bar.model, known) + bar_attention_s(bar, known, unknowns)


def fit_others(known: Constants, given: list[Bar]) -> Constants:
    """linear_flops_per_s and serial_s, from what the bars have beside attention."""
    by_model = {
        model: [bar.other_s for bar in given if bar.model == model and bar.other_s] for model in (WAN, COGVIDEOX)
    }
    at_one = replace(known, linear_flops_per_s=1.0, serial_s=0.0)
    wan, cog = (np.median(by_model[model]) for model in (WAN, COGVIDEOX))
    flops = other_s(WAN, at_one), other_s(COGVIDEOX, at_one)
    rate = (flops[0] - flops[1]) / (wan - cog)
    return replace(known, linear_flops_per_s=float(rate), serial_s=float(max(wan - flops[0] / rate, 0.0)))


def main() -> None:
    argparse.ArgumentParser(
        usage="python -m scripts.reproduce.authors.fit",
        description="Fits the constants of a800 and h800 to half of what the paper's authors measured; prints them.",
    ).parse_args()
    everything = bars()
    given = [bar for bar, fitted in zip(everything, fitted_half(len(everything)), strict=True) if fitted]
    known = {name: load_hardware(name).constants for name in MACHINES}
    rates = profile_rates()
    known["a800"] = replace(known["a800"], **rates, exchange_latency_s=0.0)
    known["h800"] = replace(known["h800"], exchange_bytes_per_s=rates["exchange_bytes_per_s"], exchange_latency_s=0.0)
    launch_s, blocks_s, growth_s = fit_layers(known["a800"])
    known["a800"] = replace(known["a800"], launch_s=launch_s)
    density = blocks_s / dense_s(WAN, known["a800"])
    print(f"Fig. 10: launch_s {launch_s:.4g}, density {density:.4f}, growth {growth_s:.4g} s")
    known = {name: fit_others(known[name], [bar for bar in given if bar.machine == name]) for name in MACHINES}
    eight_bit, unknowns = fit_bars(known, given)
    for name in MACHINES:
        print(f"{name}: {known[name]}\n  sparge: {eight_bit[name]}")
    print(unknowns)


if __name__ == "__main__":
    main()

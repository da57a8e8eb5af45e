"""Fits a800 and h800 (configs/hardware) to what the db-SP paper's authors measured on 8 GPUs; prints the errors too.

Bars of 4 GPUs, and half of Fig. 10's layers, which a seed chooses, are held out. fig8 and fig10 show both parts next
to the model, with the constants of the hardware files and of this file.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import least_squares

from dbsp_core.cost.machine import Constants, Hardware, load_hardware
from scripts.reproduce.authors.measured import (
    DBSP,
    PARO,
    PROFILE,
    SPARGE,
    STRATEGIES,
    Bar,
    attention_ms,
    bars,
    fitted_half,
)
from scripts.reproduce.authors.runs import UNKNOWNS, Unknowns, attention_s, dense_s, end_to_end_s, other_s

WAN, COGVIDEOX = "wan2.1-t2v-14b", "cogvideox1.5-5b"
MACHINES = ("a800", "h800")
FIRST_LAYER, GROWTH = 0.0943, 0.2943e-3
"""Fig. 10's masks, as this program finds them: density of the first layer, and seconds by which the heaviest head's
blocks take longer from one layer to the next on one GPU."""


def in_scripts(hardware: Hardware, method: str, model: str) -> Hardware:
    """A machine where each attention takes what the authors' scripts take on top of blocks and exchanges."""
    return replace(hardware, constants=replace(hardware.constants, call_s=UNKNOWNS.call_s(method, model)))


@dataclass(frozen=True)
class Fit:
    """The constants of the machines with their 8-bit kernels, and what else the bars need."""

    machines: dict[str, Constants]
    unknowns: Unknowns
    score_flops: float  # FLOP of the products that take as long as one score's softmax, on either machine

    def error(self, bar: Bar) -> float:
        """Modelled over measured time of a bar's video, less one."""
        return end_to_end_s(bar, self.machines[bar.machine], self.unknowns) / bar.end_to_end_s - 1


def profile_rates() -> dict[str, float]:
    """Returns Eq. 4's rates of an A800: all-to-all in bytes and dense attention in FLOP per second."""
    model_tokens, width = 75600, 5120  # Wan2.1-14B
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
            rest_s = attention_s(WAN, strategy, replace(known, launch_s=0.0), 0.0)
            rows.append(np.array([strategy.ring, 1.0, layer * strategy.ulysses / 8]) / measured)
            rest.append((measured - rest_s) / measured)
    launch_s, blocks_s, growth_s = np.linalg.lstsq(np.array(rows), np.array(rest), rcond=None)[0]
    return float(launch_s), float(blocks_s), float(growth_s)


START = {
    "linear a800": 140.0,
    "linear h800": 300.0,
    "serial": 5.0,
    "rate a800": 500.0,
    "rate h800": 1000.0,
    "score": 300.0,
    "tile": 1.4,
    PARO: 2.0,
    DBSP: 1.0,
    SPARGE: 2.0,
    WAN: 0.8,
    COGVIDEOX: 0.5,
}
"""Where `fit_bars` begins: TFLOP/s and seconds; FLOP, a factor, ns of a token and head, and densities."""


def fit_bars(known: dict[str, Constants], fitted_bars: Sequence[Bar]) -> Fit:
    """Least squares on relative errors of bars, and of all that is not attention, over the bars' times."""

    def unpack(x: np.ndarray) -> Fit:
        value = dict(zip(START, x.tolist(), strict=True))
        machines = {}
        for name in MACHINES:
            rate = value[f"rate {name}"] * 1e12
            machines[name] = replace(
                known[name],
                linear_flops_per_s=value[f"linear {name}"] * 1e12,
                serial_s=value["serial"],
                flops_per_s=rate,
                score_s=value["score"] / rate,
            )
        costs = {key: value[key] / 1e9 for key in (PARO, DBSP, SPARGE)}
        densities = {key: value[key] for key in (WAN, COGVIDEOX)}
        return Fit(machines, Unknowns(densities, value["tile"], costs), value["score"])

    def errors(x: np.ndarray) -> list[float]:
        fit = unpack(x)
        rest_s = [
            (other_s(bar.model, fit.machines[bar.machine], bar.gpus) - bar.other_s) / bar.end_to_end_s
            for bar in fitted_bars
            if bar.other_s is not None
        ]
        return [fit.error(bar) for bar in fitted_bars] + rest_s

    start = np.array([*START.values()])
    return unpack(least_squares(errors, start, bounds=(start / 100, start * 100), x_scale=start).x)


def errors_in_words(errors: Sequence[float]) -> str:
    sizes = np.abs(errors)
    return f"{len(sizes)} bars, median error {np.median(sizes):.1%}, worst {sizes.max():.1%}"


def main() -> None:
    argparse.ArgumentParser(
        usage="python -m scripts.reproduce.authors.fit",
        description="Fits the constants of a800 and h800 to what the paper's authors measured on 8 GPUs; prints them.",
    ).parse_args()
    known = {name: load_hardware(name).constants for name in MACHINES}
    rates = profile_rates()
    known["a800"] = replace(known["a800"], **rates)
    launch_s, blocks_s, growth_s = fit_layers(known["a800"])
    density = blocks_s / dense_s(WAN, known["a800"])
    print(f"Fig. 10: launch_s {launch_s:.4g}, density {density:.4f}, growth {growth_s:.4g} s; {rates}")
    known = {
        name: replace(constants, launch_s=launch_s, exchange_bytes_per_s=rates["exchange_bytes_per_s"])
        for name, constants in known.items()
    }
    fitted_bars = [bar for bar in bars() if bar.fitted]
    fit = fit_bars(known, fitted_bars)
    for name, constants in fit.machines.items():
        print(f"{name}: {constants}")
    print(f"{fit.unknowns}, score_flops {fit.score_flops:.4g}")
    print(f"fitted: {errors_in_words([fit.error(bar) for bar in fitted_bars])}")
    print(f"held out, 4 GPUs: {errors_in_words([fit.error(bar) for bar in bars() if not bar.fitted])}")


if __name__ == "__main__":
    main()

"""KnapFormer's Fig. 2: a layer's time over the length of its sequence, predicted from FLOP alone and with γ fitted.

The paper measures FLUX on H100s. Here one plain layer (12·d² weights, as Eq. 1 counts) is measured on one CPU core,
processor time, lengths interleaved, the least of each, as other programs share the machine; the picture also has γ
by the constants in configs/hardware.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch
from matplotlib.figure import Figure

from dbsp_core.cost.machine import SHIPPED, Hardware, load_hardware
from dbsp_core.cost.prediction import block_s
from dbsp_core.cost.sequence_cost import LayerSize
from dbsp_core.reports.style import INK
from scripts.reproduce.knapformer.shared import FLUX, knapformer_arguments
from scripts.results.colours import ROLES
from scripts.results.figures import legend_below, panels
from scripts.results.result import Result

WIDTH, HEAD_DIM = 512, 64


def gamma_of(layer: LayerSize, hardware: Hardware) -> float:
    """Returns KnapFormer's γ (Eq. 2): seconds per FLOP of attention over seconds per FLOP of everything else."""
    known = hardware.constants
    return block_s(1, 1, layer.head_dim, known) / (4 * layer.head_dim) * known.linear_flops_per_s


@dataclass(frozen=True)
class Row:
    """by_flops: predicted by Eq. 1 times one constant;  by_gamma: by Eq. 2, with γ;  *_error: relative"""

    tokens: int
    measured_ms: float
    by_flops_ms: float
    by_flops_error: float
    by_gamma_ms: float
    by_gamma_error: float
    gamma: float
    label: str


class Layer(torch.nn.Module):
    """A transformer layer with an MLP four times as wide: 24·n·d² FLOP in linear layers, 4·n²·d in attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.GELU("tanh"), torch.nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            self.qkv(self.norms[0](x)).unflatten(-1, (3, -1, HEAD_DIM)).movedim(1, 0).transpose(1, 2).unsqueeze(1)
        )
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v)[0]
        x = x + self.out(attended.transpose(0, 1).flatten(1))
        return x + self.mlp(self.norms[1](x))


def measured_ms(lengths: list[int], repeats: int) -> list[float]:
    """Returns the least time of each length, measured interleaved."""
    torch.manual_seed(0)
    layer, found = Layer().eval(), [[] for _ in lengths]
    with torch.no_grad():
        for turn in range(repeats + 1):  # the first is to warm up
            for times, length in zip(found, lengths, strict=True):
                x = torch.randn(length, WIDTH)
                start = time.process_time()
                layer(x)
                if turn:
                    times.append((time.process_time() - start) * 1e3)
    return [min(times) for times in found]


def fit(columns: np.ndarray, measured: np.ndarray) -> np.ndarray:
    """Coefficients with the least relative errors. columns: float64[n, k]"""
    return np.linalg.lstsq(columns / measured[:, None], np.ones_like(measured), rcond=None)[0]


def measure(lengths: list[int], repeats: int) -> list[Row]:
    n, times = np.array(lengths, dtype=np.float64), np.array(measured_ms(lengths, repeats))
    flops = np.stack([24 * n * WIDTH**2, 4 * n**2 * WIDTH], axis=1)
    linear, attention = fit(flops, times)
    by_flops = fit(flops.sum(axis=1, keepdims=True), times)[0] * flops.sum(axis=1)
    by_gamma = flops @ np.array([linear, attention])
    label = f"measured on one core of a shared CPU, width {WIDTH}, float32"
    columns = zip(lengths, times, by_flops, by_gamma, strict=True)
    return [
        Row(tokens, t, f, f / t - 1, g, g / t - 1, attention / linear, label)
        for tokens, t, f, g in ((tokens, float(t), float(f), float(g)) for tokens, t, f, g in columns)
    ]


def draw(rows: list[Row]) -> Figure:
    known = [(path.stem, gamma_of(FLUX, load_hardware(path.stem))) for path in sorted(SHIPPED.glob("*.yaml"))]
    figure, axes = panels(
        "Does a sequence cost what its FLOP say, or more for attention?",
        f"{rows[0].label}\nγ from the shipped constants: {', '.join(f'{name} {gamma:.2f}' for name, gamma in known)}",
        columns=2,
        height=4.8,
    )
    left, right = axes[0]
    tokens = [row.tokens for row in rows]
    by_flop, by_gamma = {"color": ROLES["fitted"], "linestyle": "--"}, {"color": ROLES["held out"]}
    left.plot(tokens, [row.by_flops_ms for row in rows], **by_flop, label="by FLOP alone (Eq. 1)")
    left.plot(tokens, [row.by_gamma_ms for row in rows], **by_gamma, label=f"with γ = {rows[0].gamma:.2f} (Eq. 2)")
    left.plot(tokens, [row.measured_ms for row in rows], "o", color=ROLES["measured"], label="measured")
    right.plot(tokens, [100 * row.by_flops_error for row in rows], marker="s", **by_flop)
    right.plot(tokens, [100 * row.by_gamma_error for row in rows], marker="o", **by_gamma)
    right.axhline(0, color=INK, linewidth=1)
    left.set(xscale="log", yscale="log", xlabel="tokens", ylabel="milliseconds per layer", title="Time")
    right.set(xscale="log", xlabel="tokens", ylabel="predicted over measured, %", title="Error")
    left.set_yticks([30, 100, 300, 1000], ["30", "100", "300", "1000"])
    for axis in (left, right):
        axis.set_xticks(tokens, tokens, rotation=45)
        axis.minorticks_off()
    legend_below(figure, left)
    return figure


GAMMAS = Result("knapformer-gamma", "A layer's time over its tokens", Row, draw)


def main() -> None:
    parser = knapformer_arguments(__doc__, draws=9)
    parser.add_argument("--lengths", default="256,384,512,768,1024,1536,2048,3072,4096", help="with commas")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = measure([int(part) for part in options.lengths.split(",")], options.draws)
    GAMMAS.publish(rows, options.out)


if __name__ == "__main__":
    main()

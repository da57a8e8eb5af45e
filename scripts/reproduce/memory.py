"""Memory of a GPU, counted: weights, and activations at the largest moment of a layer, by model, size and strategy."""

from __future__ import annotations

from collections.abc import Iterator

from dbsp_cli.commands.plan import memory_of, sized
from dbsp_core import Strategy
from dbsp_core.models.table import MODEL_SPECS
from scripts.results.result import Result, Row, arguments

VIDEOS = (
    ("wan2.1-t2v-1.3b", "480x832x81"),
    ("wan2.1-t2v-14b", "480x832x81"),
    ("wan2.1-t2v-14b", "720x1280x81"),
    ("wan2.2-t2v-a14b", "720x1280x81"),
    ("cogvideox1.5-5b", "768x1360x81"),
    ("hunyuanvideo", "720x1280x129"),
    ("minimax-h3", "768x1344x124"),
    ("minimax-h3", "768x1344x362"),
)
STRATEGIES = ("U1R1", "U8R1", "U1R8")


def rows() -> Iterator[Row]:
    """Gigabytes of one GPU; `dbsp_cli.commands.plan.Memory` says what is counted. size: HEIGHTxWIDTHxFRAMES"""
    for model, size in VIDEOS:
        spec = sized(MODEL_SPECS[model], size)
        for strategy in STRATEGIES:
            held = memory_of(spec, Strategy.parse(strategy))
            yield Row(
                model=model,
                size=size,
                tokens=spec.tokens,
                strategy=strategy,
                weights_gb=held.weights / 1e9,
                activations_gb=held.activations / 1e9,
                label="counted",
            )


if __name__ == "__main__":
    Result("memory", "Memory of a GPU").run(arguments(__doc__), lambda _: rows())

"""Which placement? Guidance, videos at once, strategy and decoding on so many GPUs, by predicted time and memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from dbsp_cli.simulate import ELEMENT_BYTES, LayerTime, RunConfig, simulate_layer, summarize
from dbsp_core.cost.hardware import Hardware
from dbsp_core.cost.latency import AttentionShape, Topology, require_network
from dbsp_core.cost.selection import candidates
from dbsp_core.cost.video_decode import decode_bytes, decode_s
from dbsp_core.layout.sequence_layout import SequenceLayout
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.models.spec import ModelSpec
from dbsp_core.planning.planners import require_planner
from dbsp_core.utils.byte_sizes import in_bytes
from dbsp_core.utils.errors import UserError

__all__ = ["Placement", "PlacementTime", "placements_for", "predict_placements"]

HIDDEN_TENSORS = 6
"""Tensors [tokens, width] that a transformer block holds beside q, k, v and the MLP's two. Assumed."""
ATTENTION_TENSORS = 9
"""Tensors of q's size that an attention holds at its peak with equal shares: q, k and v, and six beside them."""
_BATCHED_GUIDANCE = ("CogVideoXPipeline",)
"""Pipelines that run both guidance passes as one batch."""


@dataclass(frozen=True)
class Placement:
    """How GPUs are used. Ranks of a sequence are neighbours, then come those of guidance, then those of other videos.

    Attributes:
        videos: Groups of GPUs that make other videos.
        guidance: Groups that share out the two guidance passes of a step: 1 or 2.
        strategy: Of the ranks that share a sequence.
        vae: Whether the ranks of a video share out its tiles when it is decoded.
    """

    videos: int
    guidance: int
    strategy: Strategy
    vae: bool

    @property
    def of_a_video(self) -> int:
        """GPUs that make one video."""
        return self.guidance * self.strategy.world

    @property
    def gpus(self) -> int:
        return self.videos * self.of_a_video


@dataclass(frozen=True)
class PlacementTime:
    """What is predicted of a placement. All of it is modelled.

    Attributes:
        seconds: Until all videos are made; each group makes its share of them one after another.
        attention_s, linear_s, decode_s, serial_s: Parts of one video's: self-attention, the transformer's other work,
            decoding, and what one device does alone (text encoder).
        rho: ρ_s, mean over the layers looked at.
        memory: Most bytes that a GPU holds.
        reason: Why it cannot be run, or None.
    """

    placement: Placement
    seconds: float
    attention_s: float
    linear_s: float
    decode_s: float
    serial_s: float
    rho: float
    memory: float
    reason: str | None = None


def placements_for(
    model: ModelSpec, gpus: int, videos: int, strategies: Callable[[int], Sequence[Strategy]]
) -> Iterator[Placement]:
    """Yields every placement of a model on so many GPUs that makes so many videos.

    Args:
        strategies: Returns the strategies of so many ranks that share a sequence.
    """
    for groups in (count for count in range(1, videos + 1) if videos % count == 0 and gpus % count == 0):
        for guidance in (1, 2) if model.guided else (1,):
            if gpus % (groups * guidance):
                continue
            for strategy in strategies(gpus // (groups * guidance)):
                for vae in (False, True) if guidance * strategy.world > 1 else (False,):
                    yield Placement(groups, guidance, strategy, vae)


def predict_placements(
    model: ModelSpec,
    masks: Sequence[BlockMask],
    hardware: Hardware,
    gpus: int,
    *,
    videos: int = 1,
    planner: str = "dbsp",
    node_size: int | None = None,
    memory_limit: float | None = None,
    merges: bool = True,
) -> list[PlacementTime]:
    """Predicts every placement, the fastest first; those that do not fit a GPU come last, with the reason.

    Args:
        masks: Masks of some of the model's layers.
        node_size: GPUs per node; None for the hardware's.
        memory_limit: Bytes of a GPU; None for the hardware's.
        merges: Whether the kernel can merge partial attentions; rings are left out where it cannot.

    Raises:
        UserError: Where GPUs are on several nodes and nothing is known of the network, or nothing can be placed.
    """
    node_size = node_size or hardware.gpus_per_node or 8
    limit = memory_limit or hardware.memory_bytes
    require_network(hardware, Topology(gpus, node_size))
    known: dict[tuple[Strategy, tuple[int, ...]], list[LayerTime]] = {}
    found = []
    for placement in placements_for(model, gpus, videos, lambda world: candidates(world, masks[0].grid, merges)):
        run = RunConfig(placement.strategy, planner)
        slowest: list[LayerTime] = []
        for nodes in _node_patterns(placement, node_size):
            key = placement.strategy, nodes
            if key not in known:
                topology = Topology.of_nodes(nodes)
                known[key] = [simulate_layer(run, mask, model, hardware, topology) for mask in masks]
            slowest = max(slowest, known[key], key=_total_s)
        found.append(_predicted(placement, run, slowest, model, hardware, videos, node_size, limit))
    if not found:
        raise UserError(
            f"{gpus} GPUs cannot share {videos} video(s) of {model.name}; ask for another number of either"
        )
    return sorted(found, key=lambda one: (one.reason is not None, one.seconds, one.memory))


def _node_patterns(placement: Placement, node_size: int) -> set[tuple[int, ...]]:
    """The node of each rank of a sequence, counted from its first, of every group of ranks that share one."""
    world = placement.strategy.world
    firsts = range(0, placement.gpus, world)
    return {tuple((first + rank) // node_size - first // node_size for rank in range(world)) for first in firsts}


def _total_s(times: Sequence[LayerTime]) -> float:
    return sum(one.prediction.total_s for one in times)


def _predicted(
    placement: Placement,
    run: RunConfig,
    times: Sequence[LayerTime],
    model: ModelSpec,
    hardware: Hardware,
    videos: int,
    node_size: int,
    limit: float | None,
) -> PlacementTime:
    summary, constants, guidance = summarize(run, times, model, hardware), hardware.constants, placement.guidance
    attention_s = summary.attention_s / guidance
    linear_s = (summary.other_s - constants.serial_s) / guidance
    ranks = placement.of_a_video
    one_node = all(first // node_size == (first + ranks - 1) // node_size for first in range(0, placement.gpus, ranks))
    decoded_s = decode_s(model.decoder, model.latents, constants, ranks, shared=placement.vae, one_node=one_node)
    of_a_video = attention_s + linear_s + decoded_s + constants.serial_s
    memory = _memory(placement, run, times, model, ELEMENT_BYTES[hardware.dtype])
    reason = None
    if limit is not None and memory > limit:
        reason = f"needs {in_bytes(memory)} a GPU, which has {in_bytes(limit)}"
    return PlacementTime(
        placement,
        videos // placement.videos * of_a_video,
        attention_s,
        linear_s,
        decoded_s,
        constants.serial_s,
        summary.rho,
        memory,
        reason,
    )


def _memory(
    placement: Placement, run: RunConfig, times: Sequence[LayerTime], model: ModelSpec, element_bytes: int
) -> float:
    """Most bytes of a GPU: all weights, and the larger of what a pass and decoding hold beside them."""
    passes = 2 if model.pipeline in _BATCHED_GUIDANCE and model.guided and placement.guidance == 1 else 1
    attention = 0.0
    for one in times:
        grid = one.plan.grid
        shape = AttentionShape(passes, one.plan.heads, grid.tokens, model.head_dim, element_bytes)
        layout = SequenceLayout.named(require_planner(run.planner).layout, grid, run.strategy)
        attention = max(attention, ATTENTION_TENSORS * shape.heads * layout.shard * float(shape.token_bytes))
    tokens = -(-model.tokens // placement.strategy.world) * passes * element_bytes
    hidden = HIDDEN_TENSORS * model.width * tokens
    in_pass = hidden + max(attention, 2.0 * model.ffn * tokens)
    weights = (model.parameters + model.decoder.parameters) * element_bytes
    return weights + max(in_pass, decode_bytes(model.decoder, model.latents, shared=placement.vae))

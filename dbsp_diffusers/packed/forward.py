"""Calls of a transformer with images and videos of several sizes at once."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from dbsp_core.comm.consistency import gather_texts, needs_gradients, run_consistently
from dbsp_core.config import DbspConfig
from dbsp_core.cost.sequence_cost import LayerSize
from dbsp_core.planning.bags import BagConfig
from dbsp_core.planning.sequences import SequencePlan
from dbsp_core.runtime.session import AttentionSession
from dbsp_core.utils.errors import UserError, fingerprint_of
from dbsp_diffusers.attached import attached_to
from dbsp_diffusers.models import architecture_of
from dbsp_diffusers.packed.mmdit import FLUX, HUNYUAN
from dbsp_diffusers.packed.passes import Packing
from dbsp_diffusers.packed.samples import PackedBatch, PackedSample, SampleSpec, check_samples
from dbsp_diffusers.packed.wan import WAN

PACKINGS = {
    "WanTransformer3DModel": WAN,
    "FluxTransformer2DModel": FLUX,
    "HunyuanVideoTransformer3DModel": HUNYUAN,
}
"""Packings by transformer class name."""


def packed_forward(
    model: Any, samples: Sequence[PackedSample], *, timestep: float | None = None
) -> list[torch.Tensor]:
    """Runs images and videos of different sizes through one call of a transformer, each as if run alone.

    Samples do not attend to each other, and each has its own prompt and timestep. All ranks share the tokens evenly;
    every rank takes all samples and returns all predictions. With setting `bags`, each bag computes some of the
    samples.

    Args:
        model: A diffusers transformer that supports packing (`WanTransformer3DModel`, `FluxTransformer2DModel`,
            `HunyuanVideoTransformer3DModel`) with db-SP enabled, or a DistributedDataParallel around it.
        samples: At least one sample.
        timestep: A number that falls from step to step, for masks that depend on the step. None: the largest of the
            samples' timesteps.

    Returns:
        The model's prediction for each sample, [C, F, H, W].

    Raises:
        UserError: A sample does not fit the model, the model does not support packing, or db-SP is not enabled on it.
    """
    transformer, packing, session = _enabled(model)
    check_samples(samples, packing.spec(transformer.config))
    if not samples:
        raise UserError("packed_forward needs at least one sample, got none")
    times = torch.stack([sample.condition.timesteps.amax() for sample in samples])
    sizes, step = tuple(sample.size for sample in samples), times.amax() if timestep is None else timestep
    batch = PackedBatch(tuple(samples), sizes, samples[0].latents.device, step, bags=session.config.bags)
    _require_no_gradients(transformer, samples, session)
    return list(model(_for_attention(batch, transformer, packing, session))[:-2])


@dataclass(frozen=True, eq=False, repr=False)
class LocalPredictions:
    """Result of a packed call for one rank's own samples.

    Attributes:
        samples: The model's prediction for each sample, [C, F, H, W]; empty on a rank without samples.
        zero: A 0 that depends on the whole pass; add it to the loss, so that ranks without samples take part in
            backward.
        session: The session of this rank's attention; None: its bag had no sequences.
        plan: The bag of each sequence of all ranks, in rank order; None: all ranks shared every sequence.
    """

    samples: list[torch.Tensor]
    zero: torch.Tensor
    session: AttentionSession | None
    plan: SequencePlan | None


def packed_forward_local(
    model: Any,
    samples: Sequence[PackedSample],
    *,
    timestep: float | None = None,
    bags: BagConfig | Mapping[str, Any] | str | None = None,
) -> LocalPredictions:
    """Computes `packed_forward` with different samples on each rank, as from data loaders; a rank may have none.

    Tokens are redistributed equally over ranks, and predictions return, in one all-to-all each (KnapFormer, Zhang et
    al., 2025, §3). Timesteps and prompts are sent to the ranks with tokens of their sequence. The step's loss is the
    sum of the ranks' losses on their own predictions; after `backward` on all ranks, `sum_gradients` completes the
    gradients.

    Args:
        model: A transformer with db-SP enabled, or a DistributedDataParallel around it.
        samples: This rank's samples; at least one rank must have one. Text, pooled and image embeddings get no
            gradients.
        timestep: As for `packed_forward`; equal on all ranks.
        bags: Groups of adjacent ranks that each share some of the sequences, such as "g8n4" (4 groups of 8), or a
            value of setting `bags`; equal on all ranks. None: that setting, else all ranks share every sequence.

    Returns:
        The predictions for this rank's samples, and their distribution.

    Raises:
        UserError: As for `packed_forward`; raised on all ranks.
    """
    transformer, packing, session = _enabled(model)
    batch = _gathered(transformer, packing.spec(transformer.config), samples, session, timestep, bags)
    *predictions, zero, sharing = model(_for_attention(batch, transformer, packing, session))
    return LocalPredictions(predictions, zero, sharing.session, sharing.plan)


def _gathered(
    transformer: Any,
    spec: SampleSpec,
    samples: Sequence[PackedSample],
    session: AttentionSession,
    timestep: float | None,
    bags: BagConfig | Mapping[str, Any] | str | None,
) -> PackedBatch:
    """Builds the batch of this rank's samples, with the sizes of all ranks' samples. Collective."""
    control = session.group.control()

    def described() -> tuple[list[dict[str, Any]], BagConfig | None]:
        check_samples(samples, spec)
        _require_no_gradients(transformer, samples, session)
        shared_by = session.config.bags if bags is None else DbspConfig.load({"bags": bags}).bags
        if shared_by is not None:
            shared_by.require_ranks(session.group.size)
        if timestep is not None or not samples:
            return [_described(sample, timestep or 0.0) for sample in samples], shared_by
        latest = torch.stack([sample.condition.timesteps.amax() for sample in samples])
        return list(map(_described, samples, latest.tolist())), shared_by

    # 1. Exchange descriptions of samples
    mine, shared_by = run_consistently(control, described, lambda made: fingerprint_of(made[1]), "setting bags")
    of_ranks = [json.loads(text) for text in gather_texts(control, json.dumps(mine))]
    every = [sample for of_rank in of_ranks for sample in of_rank]
    # 2. Build the batch
    if not every:
        raise UserError("no rank has a sample; pass at least one sample on at least one rank")
    kinds = [
        {name: (shape, getattr(torch, dtype)) for name, (shape, dtype) in sample["kinds"].items()} for sample in every
    ]
    types = {str(kind["text"][1]) for kind in kinds}
    if len(types) > 1:
        raise UserError(f"text embeddings must share a dtype, got {', '.join(sorted(types))}")
    return PackedBatch(
        samples=tuple(samples),
        sizes=tuple(tuple(sample["size"]) for sample in every),
        device=next(transformer.parameters()).device,
        timestep=max(sample["timestep"] for sample in every),
        loaders=tuple(rank for rank, of_rank in enumerate(of_ranks) for _ in of_rank),
        kinds=tuple(kinds),
        debug=session.config.debug,
        bags=shared_by,
    )


def _described(sample: PackedSample, timestep: float) -> dict[str, Any]:
    tensors = {name: value for name, value in vars(sample.condition).items() if value is not None}
    kinds = {name: (list(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for name, tensor in tensors.items()}
    return {"size": sample.size, "kinds": kinds, "timestep": timestep}


def _require_no_gradients(transformer: Any, samples: Sequence[PackedSample], session: AttentionSession) -> None:
    """Raises UserError for gradients that this session does not support; bags without sequences would not notice."""
    rejection = session.config.precision.no_gradients
    if rejection and needs_gradients(*transformer.parameters(), *(sample.latents for sample in samples)):
        raise UserError(rejection)


def _for_attention(batch: PackedBatch, transformer: Any, packing: Packing, session: AttentionSession) -> PackedBatch:
    """Returns the batch with videos and layer sizes for attention."""
    element_bytes = next(transformer.parameters()).element_size()
    sizes = session.heads, transformer.config.attention_head_dim, packing.token_flops(transformer)
    layer = LayerSize(*sizes, element_bytes=element_bytes, comm_dtype=session.config.precision)
    return replace(batch, videos=tuple(packing.videos(transformer, batch)), layer=layer)


def _enabled(model: Any) -> tuple[Any, Packing, AttentionSession]:
    """Returns a model's transformer, packing and session, and patches it once. Raises UserError for other models."""
    transformer = model.module if isinstance(model, DistributedDataParallel) else model
    architecture_of(transformer)  # raises for unknown classes
    packing = next((PACKINGS[cls.__name__] for cls in type(transformer).__mro__ if cls.__name__ in PACKINGS), None)
    if packing is None:
        raise UserError(
            f"{type(transformer).__name__} does not support several sizes in one call; use {', '.join(PACKINGS)}"
        )
    if getattr(transformer, "is_cache_enabled", False):
        raise UserError("step caches do not support packed sequences; call disable_cache first")
    state = attached_to(transformer)
    if state is None:
        raise UserError("packed_forward needs db-SP on the transformer; call dbsp_diffusers.enable first")
    packing.attach(transformer, state.patches)
    return transformer, packing, state.sessions[transformer]

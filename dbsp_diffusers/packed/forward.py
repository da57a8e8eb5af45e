"""A transformer called with images and videos of several sizes at once."""

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
"""How transformers take samples of several sizes in one call, by class name."""


def packed_forward(
    model: Any, samples: Sequence[PackedSample], *, timestep: float | None = None
) -> list[torch.Tensor]:
    """Runs one call of a transformer for images and videos of different sizes: as if each were run by itself.

    No sample attends to another, and each has a prompt and a timestep of its own. With db-SP enabled on the
    transformer (`enable`) their tokens are shared by all ranks, as even as one sequence's; every rank is given all
    samples and returns all predictions; with setting `bags` each bag computes some.

    Args:
        model: A transformer of diffusers that takes several sizes (`WanTransformer3DModel`, `FluxTransformer2DModel`,
            `HunyuanVideoTransformer3DModel`), or a DistributedDataParallel around it.
        samples: At least one.
        timestep: A number that falls from step to step of a denoising, for masks that depend on the step. Default:
            the largest of the samples' timesteps.

    Returns:
        The model's prediction for each sample, [C, F, H, W].

    Raises:
        UserError: For samples that the model cannot be given, a model that takes one size at a time, or one on which
            db-SP is not enabled.
    """
    transformer, packing, session = _enabled(model)
    check_samples(samples, packing.spec(transformer.config))
    if not samples:
        raise UserError("packed_forward was given no samples; give it at least one")
    times = torch.stack([sample.condition.timesteps.amax() for sample in samples])
    sizes, step = tuple(sample.size for sample in samples), times.amax() if timestep is None else timestep
    batch = PackedBatch(tuple(samples), sizes, samples[0].latents.device, step, bags=session.config.bags)
    _require_no_gradients(transformer, samples, session)
    return list(model(_for_attention(batch, transformer, packing, session))[:-2])


@dataclass(frozen=True, eq=False, repr=False)
class LocalPredictions:
    """Result of a packed call on one rank, for its own samples.

    Attributes:
        samples: The model's prediction for each, [C, F, H, W]; empty on a rank that was given none.
        zero: The number 0, which depends on the whole pass. Added to the loss it lets every rank take part in
            backward, one without samples too.
        session: The session that computed this rank's attention: its plans and numbers. None: its bag had nothing.
        plan: The bag of each sequence of all ranks, in the order of ranks; None: all ranks shared in each.
    """

    samples: list[torch.Tensor]
    zero: torch.Tensor
    session: AttentionSession | None
    plan: SequencePlan | None

    def __repr__(self) -> str:
        return f"<LocalPredictions of {len(self.samples)} samples>"


def packed_forward_local(
    model: Any,
    samples: Sequence[PackedSample],
    *,
    timestep: float | None = None,
    bags: BagConfig | Mapping[str, Any] | str | None = None,
) -> LocalPredictions:
    """Computes `packed_forward` of samples that each rank has of its own, as from its data loader, maybe none.

    Tokens go to the ranks that share all of them equally, and predictions return, in one all-to-all each
    (KnapFormer, Zhang et al., 2025, §3). Timesteps and prompts go to the ranks that have tokens of their sequence. The
    loss of the step is the sum of what the ranks make of their own predictions: after `backward` on all ranks,
    `sum_gradients` gives each parameter its gradient.

    Args:
        model: A transformer on which db-SP is enabled, or a DistributedDataParallel around it.
        samples: This rank's. At least one rank must have one. Nothing flows back into text, pooled or image
            embeddings.
        timestep: As for `packed_forward`; equal on all ranks.
        bags: Groups of neighbouring ranks, each of which shares some of the sequences, "g8n4" for 4 of 8; or as
            setting `bags` has it. Equal on all ranks. Default: that setting; without it all ranks share every
            sequence.

    Returns:
        The predictions for this rank's samples, and how they were distributed.

    Raises:
        UserError: On all ranks together, as `packed_forward` does, and where db-SP is not enabled.
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
    """Builds the batch of this rank's samples, with the sizes of all ranks'. Collective."""
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

    # 1. Each rank describes its samples to all.
    mine, shared_by = run_consistently(control, described, lambda made: fingerprint_of(made[1]), "setting bags")
    of_ranks = [json.loads(text) for text in gather_texts(control, json.dumps(mine))]
    every = [sample for of_rank in of_ranks for sample in of_rank]
    # 2. The batch.
    if not every:
        raise UserError("no rank was given a sample; give at least one rank at least one")
    kinds = [
        {name: (shape, getattr(torch, dtype)) for name, (shape, dtype) in sample["kinds"].items()} for sample in every
    ]
    types = {str(of_sample["text"][1]) for of_sample in kinds}
    if len(types) > 1:
        raise UserError(f"text embeddings are of dtypes {', '.join(sorted(types))}; give one")
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
    """Returns what other ranks must know of a sample."""
    tensors = {name: value for name, value in vars(sample.condition).items() if value is not None}
    kinds = {name: (list(one.shape), str(one.dtype).removeprefix("torch.")) for name, one in tensors.items()}
    return {"size": sample.size, "kinds": kinds, "timestep": timestep}


def _require_no_gradients(transformer: Any, samples: Sequence[PackedSample], session: AttentionSession) -> None:
    """Raises UserError where gradients are recorded that this session's attention does not have.

    Before anything is distributed: of several bags some may have nothing to attend to, and would not notice.
    """
    rejection = session.config.precision.no_gradients
    if rejection is None:
        return
    of_samples = (sample.latents for sample in samples)
    if needs_gradients(*transformer.parameters(), *of_samples):
        raise UserError(rejection)


def _for_attention(batch: PackedBatch, transformer: Any, packing: Packing, session: AttentionSession) -> PackedBatch:
    """Returns the batch with its sequences as attention needs them."""
    element_bytes = next(transformer.parameters()).element_size()
    sizes = session.heads, transformer.config.attention_head_dim, packing.token_flops(transformer)
    layer = LayerSize(*sizes, element_bytes=element_bytes, comm_dtype=session.config.precision)
    return replace(batch, videos=tuple(packing.videos(transformer, batch)), layer=layer)


def _enabled(model: Any) -> tuple[Any, Packing, AttentionSession]:
    """Returns the transformer of a model, its packing and session. Patches it at its first packed call.

    Raises UserError for one that takes one size at a time, or on which db-SP is not enabled.
    """
    transformer = model.module if isinstance(model, DistributedDataParallel) else model
    architecture_of(transformer)  # raises for one that db-SP does not know
    packing = next((PACKINGS[cls.__name__] for cls in type(transformer).__mro__ if cls.__name__ in PACKINGS), None)
    if packing is None:
        raise UserError(f"{type(transformer).__name__} takes one size at a time; several take {', '.join(PACKINGS)}")
    if getattr(transformer, "is_cache_enabled", False):
        raise UserError("a step cache compares one sequence with itself; call disable_cache before several are packed")
    state = attached_to(transformer)
    if state is None:
        raise UserError("samples of several sizes need db-SP on the transformer; call dbsp_diffusers.enable first")
    packing.attach(transformer, state.patches)
    return transformer, packing, state.sessions[transformer]

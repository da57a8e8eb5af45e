"""The two halves of the ranks in guidance parallelism, and the decision to have them, the same on all ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch

from dbsp_core.comm.consistency import check_consistent
from dbsp_core.comm.groups import SequenceGroup, node_fingerprints, number_nodes
from dbsp_core.config import ConfigLike, DbspConfig
from dbsp_core.cost.machine import hardware_for
from dbsp_core.cost.prediction import AUTO, AttentionShape
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.masks.grid import BlockGrid
from dbsp_core.models.settings import TOKEN_PIXELS, GenerateSettings
from dbsp_core.models.signature import token_grid
from dbsp_core.models.table import published_model
from dbsp_core.utils.errors import UserError, fingerprint_of
from dbsp_diffusers.devices import require_own_gpus, use_model_device
from dbsp_diffusers.models import architecture_of
from dbsp_diffusers.models.transformers import transformers_of
from dbsp_diffusers.resolve import identify, resolve_config
from dbsp_diffusers.sharding.guided_step import GuidedStep

Guidance = bool | Literal["auto"]
"""True if two halves of the ranks compute a step's two CFG passes; "auto": if that is predicted to be faster."""
_SIZE = ("num_frames", "height", "width")
GUIDANCE_DIFFERS = "guidance, or what it is decided by, differs on rank(s) {}; give all ranks the same"


@dataclass(frozen=True)
class Halves:
    """The two halves of the ranks that make one video.

    Attributes:
        ranks: All ranks.
        own: This rank's half.
    """

    ranks: SequenceGroup
    own: SequenceGroup

    @classmethod
    def chosen(
        cls, guidance: Guidance, model: Any, config: ConfigLike, strategy: Strategy | str | None, ranks: SequenceGroup
    ) -> Halves | None:
        """Returns the halves if `guidance` asks for them, else None. Collective.

        Args:
            model: A pipeline or transformer.
            strategy: Strategy of the ranks of a half, if the configuration does not name it.

        Raises:
            UserError: On all ranks, for an odd number of them or a model that runs guidance in another way.
        """
        wanted: GuidedStep | bool = False
        problem: Exception | None = None
        device = (-1, 0)
        try:
            wanted = _wanted(guidance, model, config, strategy, ranks.size)
            device = use_model_device(transformers_of(model).values(), ranks)  # on which a half's communicator is made
        except Exception as error:  # any error: this rank must not stop alone
            problem = error
        fingerprints = {GUIDANCE_DIFFERS: fingerprint_of((guidance, wanted))}
        numbers = check_consistent(ranks.control(), problem, fingerprints, numbers=[*device, *node_fingerprints()])
        require_own_gpus(ranks, [row[:2] for row in numbers])
        nodes = number_nodes(ranks, [row[2:] for row in numbers])
        if isinstance(wanted, GuidedStep):  # whole nanoseconds: a last bit must not decide
            seconds = [round(one * 1e9) for one in (wanted.seconds(nodes), wanted.halved_seconds(nodes))]
            wanted = seconds[1] < seconds[0]
        if not wanted:
            return None
        size = ranks.size // 2
        return cls(ranks, ranks.part(size * (ranks.rank // size), size))

    @property
    def second(self) -> bool:
        """True if this rank is in the second half."""
        return self.ranks.rank >= self.own.size

    def exchange(self, mine: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the tensors of the first and the second half, of one shape and dtype. Collective.

        Each rank exchanges its tensor with one rank of the other half.
        """
        splits = [0] * self.ranks.size
        splits[(self.ranks.rank + self.own.size) % self.ranks.size] = mine.numel()
        other = self.ranks.all_to_all(mine.reshape(-1), splits, splits).view(mine.shape)
        return (other, mine) if self.second else (mine, other)


def _wanted(
    guidance: Guidance, model: Any, config: ConfigLike, strategy: Strategy | str | None, size: int
) -> GuidedStep | bool:
    """Returns True if there are to be two halves, or the step by whose predicted time ranks decide."""
    transformers = transformers_of(model)
    unknown = [type(one).__name__ for one in transformers.values() if architecture_of(one).guidance is None]
    if guidance is True and size % 2:
        raise UserError(f"guidance=True halves the ranks, and there are {size}; use an even number of ranks")
    if guidance is True and unknown:
        raise UserError(
            f"guidance=True: db-SP does not know how pipelines run the two CFG passes of {unknown[0]}; leave "
            "guidance out"
        )
    if guidance is True:
        return True
    if guidance != AUTO:
        raise UserError(f'guidance must be True, False or "auto", got {guidance!r}')
    name, transformer = next(iter(transformers.items()))
    pipe = None if transformer is model else model
    own = resolve_config(config, transformer, pipe, name)
    if strategy is not None or isinstance(own.strategy, Strategy):
        raise UserError('guidance="auto" chooses how ranks are used; leave strategy out, or set guidance=True')
    if size % 2 or unknown:
        return False
    return _step(own, transformer, pipe)


def _step(own: DbspConfig, transformer: Any, pipe: Any) -> GuidedStep | bool:
    """Returns the guided step of a configuration's video; without one, or constants of the machine, a rule's answer.

    The rule: two halves send less, in fewer messages, so that guidance is shared by them if there is any.
    """
    identity = identify(transformer, pipe)
    spec = published_model(identity)
    usual = GenerateSettings() if spec is None else spec.video
    video = {name: getattr(own.generate, name) or getattr(usual, name) for name in _SIZE}
    scale = usual.guidance_scale if own.generate.guidance_scale is None else own.generate.guidance_scale
    if scale is not None and scale <= 1:
        return False
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    hardware = hardware_for(own.machine, kind, own.kernel)
    layers, heads, head_dim, patch_frames = identity.sizes
    if hardware is None or None in video.values() or not heads:
        return True
    like = next(transformer.parameters())
    text, pixels = (0, TOKEN_PIXELS) if spec is None else (spec.text_tokens, spec.token_pixels)
    tokens = text + math.prod(token_grid(video["num_frames"], video["height"], video["width"], patch_frames, pixels))
    mask = BlockMask.dense(heads, BlockGrid.uniform(tokens, block=128))  # masks hardly change what is sent
    shape = AttentionShape(1, heads, head_dim, like.element_size())
    output_bytes = tokens * transformer.proj_out.out_features * like.element_size()
    return GuidedStep(mask, shape, layers, output_bytes, hardware, own.strategy == AUTO)

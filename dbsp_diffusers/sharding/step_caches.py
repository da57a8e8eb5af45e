"""Step caches of diffusers and cache-dit on a transformer that db-SP shards: all ranks must skip the same layers.

A cache that decides from what it sees would decide from only one rank's tokens; its decision is replaced by one over
the tokens of all ranks. Caches that go by the step need nothing. Both libraries keep to themselves what this needs:
tests/diffusers/test_step_caches.py fails where another version has it otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.utils.errors import UserError
from dbsp_diffusers.patching import PatchSet
from dbsp_diffusers.sharding.stream_shards import StreamShards


@dataclass(frozen=True, eq=False)
class ForwardRanks:
    """The ranks that run one forward pass together."""

    group: SequenceGroup  # The ranks that share the sequence
    video: Callable[[], StreamShards]  # Returns how the video of the current pass is sharded
    reached: Callable[[], Collection[int]]  # Returns the layers whose attention db-SP has computed in the current pass

    def change(self, before: torch.Tensor, now: torch.Tensor) -> tuple[float, float]:
        """Sums (Σ |now − before|, Σ |before|) over the real tokens of all ranks; padding weighs nothing.

        Collective. Bitwise identical on every rank: each sums the same parts in one order.
        Raises UserError, on all ranks, for a tensor of another shape.

        Args:
            before, now: [B, shard, C].
        """
        video = self.video()
        if before.shape != now.shape or now.ndim != 3 or now.shape[1] != video.shard:
            raise UserError(
                f"a step cache compares tensors of shape {tuple(before.shape)} and {tuple(now.shape)}, where db-SP "
                f"has shards of {video.shard} tokens; disable that cache, or enable it again after db-SP"
            )
        before, now = before[:, : video.tokens_here], now[:, : video.tokens_here]
        sums = torch.stack([(now - before).abs().sum(dtype=torch.float64), before.abs().sum(dtype=torch.float64)])
        difference, size = torch.stack(self.group.all_gather(sums)).sum(dim=0).tolist()
        return difference, size


DECIDING = "FBCHeadBlockHook"
"""diffusers' first-block cache: decides by how much the first block's residual has changed."""
_DECISION = "_should_compute_remaining_blocks"
SKIPS_NOTHING = "PeftInputAutocastDisableHook"
IDENTICAL = {
    *("FBCBlockHook", "MagCacheHeadHook", "MagCacheBlockHook", "TaylorSeerCacheHook", "PyramidAttentionBroadcastHook"),
    *("FasterCacheBlockHook", "TextKVCacheTransformerHook", "TextKVCacheBlockHook", "TransformerBlockSkipHook"),
    *("FeedForwardSkipHook", SKIPS_NOTHING, "FasterCacheDenoiserHook"),
    *("SeaCacheRootHook", "SeaCacheLeaderBlockHook", "SeaCacheBlockHook", "SeaCachePostNormHook"),
}
"""Hooks of diffusers that skip consistently on all ranks.

They go by step, timestep, another hook's decision or the whole input, or skip nothing.
"""


def may_skip(transformer: nn.Module, block: nn.Module) -> bool:
    """Returns True if a step cache or layer skip may leave out the attention of a block."""
    return bool(names_of_caches(transformer, [block]))


def names_of_caches(transformer: nn.Module, blocks: Iterable[nn.Module]) -> set[str]:
    """Returns the names of what may leave out attentions of some blocks: classes of diffusers' hooks, libraries."""
    names = {type(hook).__name__ for _, hook in _skipping_hooks(transformer, blocks)} - {SKIPS_NOTHING}
    return names | ({"cache-dit or ParaAttention"} if getattr(transformer, "_is_cached", False) else set())


@dataclass(frozen=True, eq=False)
class StepCaches:
    """Looks before each pass which step caches a transformer has, and lets all ranks decide together."""

    transformer: nn.Module
    blocks: Sequence[nn.Module]
    together: ForwardRanks

    def attach(self, patches: PatchSet) -> None:
        """Looks for the first time. What caches have kept, before and until `patches` are undone, is forgotten.

        Those are tensors of other tokens than in the next pass, made with another mask.
        """
        patches.on_detach(self._release)
        self.look()
        self._reset()
        patches.on_detach(self._reset)

    def look(self) -> None:
        """Raises UserError for a cache that cannot be made to decide consistently on all ranks."""
        for _, hook in _skipping_hooks(self.transformer, self.blocks):
            name = type(hook).__name__
            if name == DECIDING and all(hasattr(hook, part) for part in ("state_manager", "threshold", _DECISION)):
                vars(hook).setdefault(_DECISION, self._first_block(hook))
            elif name not in IDENTICAL:
                raise _unknown(f"a {name}")
        manager, contexts = _cache_dit_of(self.transformer)
        if manager is not None:
            _decide_together(manager, contexts, self.together)

    def _first_block(self, hook: Any) -> Callable[[torch.Tensor], bool]:
        """Decides for diffusers' hook whether the change since the last computed pass is above its threshold."""

        @torch.compiler.disable
        def should_compute(residual: torch.Tensor) -> bool:
            before = hook.state_manager.get_state().head_block_residual
            if before is None or before.shape != residual.shape:
                return True
            difference, size = self.together.change(before, residual)
            return difference > hook.threshold * size

        return should_compute

    def _reset(self) -> None:
        """Lets diffusers' caches forget earlier passes, as its pipelines do after a call that succeeds."""
        for module, hook in _skipping_hooks(self.transformer, self.blocks):
            if hook._is_stateful:
                hook.reset_state(module)

    def _release(self) -> None:
        """Leaves every cache with its own decision."""
        for _, hook in _skipping_hooks(self.transformer, self.blocks):
            vars(hook).pop(_DECISION, None)
        manager, contexts = _cache_dit_of(self.transformer)
        if manager is not None and "_dbsp_ranks" in vars(manager):
            for context in contexts:
                manager._dbsp_ranks.pop(context, None)
            if not manager._dbsp_ranks:  # the last of its transformers leaves it as it was
                del manager._dbsp_ranks, manager.similarity


def _cache_dit_of(transformer: nn.Module) -> tuple[Any, Sequence[str]]:
    """Returns cache-dit's manager of what it has cached of a transformer, and its names there; None without it."""
    attributes = vars(transformer)
    manager = attributes.get("_context_manager") if attributes.get("_is_cached", False) else None
    return manager, attributes.get("_context_names", ())


def _decide_together(manager: Any, contexts: Sequence[str], together: ForwardRanks) -> None:
    """Replaces `similarity` of a manager of cache-dit, which the transformers of a pipeline share.

    cache-dit's own function still decides and keeps its records, but on two numbers, from the tokens of all ranks of
    the transformer whose pass it is, by the name of its cache in `_dbsp_ranks`. It decides alone for a transformer
    without db-SP.
    """
    needed = ("similarity", "get_important_condition_threshold", "get_context")
    if not contexts or not all(callable(getattr(manager, name, None)) for name in needed):
        raise _unknown("this version of cache-dit")
    if "_dbsp_ranks" not in vars(manager):
        own, ranks = manager.similarity, dict[str, ForwardRanks]()

        @torch.compiler.disable
        def similarity(t1: torch.Tensor, t2: torch.Tensor, *, parallelized: bool = False, **options: Any) -> Any:
            """Decides whether two tensors are similar, by mean |t1 − t2| / mean |t1|."""
            deciding = ranks.get(manager.get_context().name)
            if deciding is None:
                return own(t1, t2, parallelized=parallelized, **options)
            if manager.get_important_condition_threshold() > 0:  # looks for the tokens that matter among one rank's
                raise _unknown("cache-dit with important_condition_threshold above 0")
            if t1.shape == t2.shape:
                difference, size = deciding.change(t1, t2)
                t1, t2 = torch.tensor([[size], [size - difference]], dtype=torch.float64, device="cpu")
            return own(t1, t2, parallelized=False, **options)

        manager.similarity, manager._dbsp_ranks = similarity, ranks
    manager._dbsp_ranks.update(dict.fromkeys(contexts, together))


def _unknown(what: str) -> UserError:
    return UserError(
        f"db-SP does not know whether {what} skips the same layers on all ranks, and without that they wait for each "
        "other forever; disable the cache (transformer.disable_cache()), or install the versions of constraints.txt"
    )


def _skipping_hooks(transformer: nn.Module, blocks: Iterable[nn.Module]) -> list[tuple[nn.Module, Any]]:
    """Returns diffusers' hooks that may do something else than call their module, each with its module.

    Caches are put on the transformer, its blocks and their attentions.
    """
    modules, found = [transformer], []
    for block in blocks:
        modules += [block, *block.children()]
    for module in modules:
        for hook in getattr(getattr(module, "_diffusers_hook", None), "hooks", {}).values():
            if hasattr(hook, "new_forward"):
                found.append((module, hook))
    return found

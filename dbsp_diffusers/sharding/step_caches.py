"""Makes step caches of diffusers and cache-dit skip the same layers on all ranks.

A cache that decides by tokens would see only one rank's, so its decision is replaced by one over all ranks' tokens.
Caches that decide by the step are unchanged. This uses private names of both libraries;
tests/diffusers/test_step_caches.py fails if they change.
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

    group: SequenceGroup  # the ranks that share the sequence
    video: Callable[[], StreamShards]  # returns the video shards of the current pass
    reached: Callable[[], Collection[int]]  # returns the layers that db-SP has computed in the current pass

    def change(self, before: torch.Tensor, now: torch.Tensor) -> tuple[float, float]:
        """Returns (Σ |now − before|, Σ |before|) of [B, shard, C] over the real tokens of all ranks. Collective.

        Bitwise identical on every rank. Raises UserError on all ranks for other shapes.
        """
        video = self.video()
        if before.shape != now.shape or now.ndim != 3 or now.shape[1] != video.shard:
            raise UserError(
                f"a step cache compares tensors of shape {tuple(before.shape)} and {tuple(now.shape)}, expected "
                f"shards of {video.shard} tokens; disable that cache, or enable it again after db-SP"
            )
        before, now = before[:, : video.tokens_here], now[:, : video.tokens_here]
        sums = torch.stack([(now - before).abs().sum(dtype=torch.float64), before.abs().sum(dtype=torch.float64)])
        difference, size = torch.stack(self.group.all_gather(sums)).sum(dim=0).tolist()
        return difference, size


DECIDING = "FBCHeadBlockHook"  # of diffusers' first-block cache, which decides by the change of a residual
_DECISION = "_should_compute_remaining_blocks"
SKIPS_NOTHING = "PeftInputAutocastDisableHook"
IDENTICAL = {
    *("FBCBlockHook", "MagCacheHeadHook", "MagCacheBlockHook", "TaylorSeerCacheHook", "PyramidAttentionBroadcastHook"),
    *("FasterCacheBlockHook", "TextKVCacheTransformerHook", "TextKVCacheBlockHook", "TransformerBlockSkipHook"),
    *("FeedForwardSkipHook", SKIPS_NOTHING, "FasterCacheDenoiserHook"),
    *("SeaCacheRootHook", "SeaCacheLeaderBlockHook", "SeaCacheBlockHook", "SeaCachePostNormHook"),
}
"""Hooks of diffusers that skip consistently on all ranks.

They decide by step, timestep, another hook's decision or the whole input, or skip nothing.
"""


def names_of_caches(transformer: nn.Module, blocks: Iterable[nn.Module]) -> set[str]:
    """Returns the names of hooks (diffusers) or libraries that may skip attention in some blocks."""
    names = {type(hook).__name__ for _, hook in _skipping_hooks(transformer, blocks)} - {SKIPS_NOTHING}
    return names | ({"cache-dit or ParaAttention"} if getattr(transformer, "_is_cached", False) else set())


@dataclass(frozen=True, eq=False)
class StepCaches:
    """Finds a transformer's step caches before each pass, and makes all ranks decide together."""

    transformer: nn.Module
    blocks: Sequence[nn.Module]
    together: ForwardRanks

    def attach(self, patches: PatchSet) -> None:
        """Finds caches for the first time, and resets them now and when `patches` are undone.

        Their tensors have other tokens than the next pass, and another mask.
        """
        patches.on_detach(self._release)
        self.look()
        self._reset()
        patches.on_detach(self._reset)

    def look(self) -> None:
        """Finds new caches. Raises UserError for a cache that cannot decide consistently on all ranks."""
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
        """Returns diffusers' decision function with the change over all ranks' tokens."""

        @torch.compiler.disable
        def should_compute(residual: torch.Tensor) -> bool:
            before = hook.state_manager.get_state().head_block_residual
            if before is None or before.shape != residual.shape:
                return True
            difference, size = self.together.change(before, residual)
            return difference > hook.threshold * size

        return should_compute

    def _reset(self) -> None:
        """Resets diffusers' caches, as its pipelines do after a successful call."""
        for module, hook in _skipping_hooks(self.transformer, self.blocks):
            if hook._is_stateful:
                hook.reset_state(module)

    def _release(self) -> None:
        """Restores the decision of every cache."""
        for _, hook in _skipping_hooks(self.transformer, self.blocks):
            vars(hook).pop(_DECISION, None)
        manager, contexts = _cache_dit_of(self.transformer)
        if manager is not None and "_dbsp_ranks" in vars(manager):
            for context in contexts:
                manager._dbsp_ranks.pop(context, None)
            if not manager._dbsp_ranks:  # restore it after its last transformer
                del manager._dbsp_ranks, manager.similarity


def _cache_dit_of(transformer: nn.Module) -> tuple[Any, Sequence[str]]:
    """Returns cache-dit's manager of a transformer and its context names, or None."""
    attributes = vars(transformer)
    manager = attributes.get("_context_manager") if attributes.get("_is_cached", False) else None
    return manager, attributes.get("_context_names", ())


def _decide_together(manager: Any, contexts: Sequence[str], together: ForwardRanks) -> None:
    """Replaces `similarity` of cache-dit's manager, which the transformers of a pipeline share.

    cache-dit's function still decides and keeps its records, but on two numbers over all ranks' tokens. `_dbsp_ranks`
    has the ranks by cache name; transformers without db-SP are unaffected.
    """
    needed = ("similarity", "get_important_condition_threshold", "get_context")
    if not contexts or not all(callable(getattr(manager, name, None)) for name in needed):
        raise _unknown("this version of cache-dit")
    if "_dbsp_ranks" not in vars(manager):
        decide, ranks = manager.similarity, dict[str, ForwardRanks]()

        @torch.compiler.disable
        def similarity(t1: torch.Tensor, t2: torch.Tensor, *, parallelized: bool = False, **options: Any) -> Any:
            """Decides whether two tensors are similar, by mean |t1 − t2| / mean |t1|."""
            deciding = ranks.get(manager.get_context().name)
            if deciding is None:
                return decide(t1, t2, parallelized=parallelized, **options)
            if manager.get_important_condition_threshold() > 0:  # selects tokens of one rank
                raise _unknown("cache-dit with important_condition_threshold above 0")
            if t1.shape == t2.shape:
                difference, size = deciding.change(t1, t2)
                t1, t2 = torch.tensor([[size], [size - difference]], dtype=torch.float64, device="cpu")
            return decide(t1, t2, parallelized=False, **options)

        manager.similarity, manager._dbsp_ranks = similarity, ranks
    manager._dbsp_ranks.update(dict.fromkeys(contexts, together))


def _unknown(what: str) -> UserError:
    return UserError(
        f"db-SP does not know whether {what} skips the same layers on all ranks, and without that they wait for each "
        "other forever; disable the cache (transformer.disable_cache()), or install the versions of constraints.txt"
    )


def _skipping_hooks(transformer: nn.Module, blocks: Iterable[nn.Module]) -> list[tuple[nn.Module, Any]]:
    """Returns diffusers' hooks of the transformer, its blocks and their parts that may skip their module, with it."""
    modules, hooks = [transformer], []
    for block in blocks:
        modules += [block, *block.children()]
    for module in modules:
        for hook in getattr(getattr(module, "_diffusers_hook", None), "hooks", {}).values():
            if hasattr(hook, "new_forward"):
                hooks.append((module, hook))
    return hooks

"""Step caches of diffusers and cache-dit on a transformer that db-SP shards: all ranks must skip the same layers.

A cache that decides from what it sees would decide from only one rank's tokens; its decision is replaced by one over
the tokens of all ranks. Caches that go by the step need nothing. Both libraries keep to themselves what this needs:
tests/diffusers/test_step_caches.py fails where another version has it otherwise.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
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
    hooks = (hook for module in _modules_of(transformer, blocks) for hook in _skipping_hooks(module))
    names = {type(hook).__name__ for hook in hooks} - {SKIPS_NOTHING}
    return names | ({"cache-dit or ParaAttention"} if getattr(transformer, "_is_cached", False) else set())


class StepCaches:
    """Looks before each pass which step caches a transformer has, and lets all ranks decide together."""

    def __init__(self, transformer: nn.Module, blocks: Sequence[nn.Module], together: ForwardRanks) -> None:
        self._transformer = transformer
        self._blocks = blocks
        self._together = together
        self._deciding: tuple[Any, PatchSet] | None = None

    def attach(self, patches: PatchSet) -> None:
        """Looks for the first time. What caches have kept, before and until `patches` are undone, is forgotten.

        Those are tensors of other tokens than in the next pass, made with another mask.
        """
        self.look()
        patches.on_detach(self._release)
        self._reset()
        patches.on_detach(self._reset)

    def look(self) -> None:
        """Raises UserError for a cache that cannot be made to decide consistently on all ranks."""
        deciding = self._cache_dit()
        for module in _modules_of(self._transformer, self._blocks):
            for hook in _skipping_hooks(module):
                self._require_known(hook)
                if type(hook).__name__ == DECIDING:
                    deciding = hook
        if deciding is not (self._deciding and self._deciding[0]):
            self._release()
            if deciding is not None:
                self._deciding = deciding, self._take_over(deciding)

    def _release(self) -> None:
        """Leaves every cache with its own decision."""
        if self._deciding is not None:
            self._deciding[1].detach()
            self._deciding = None

    def _reset(self) -> None:
        """Lets diffusers' caches forget earlier passes, as its pipelines do after a call that succeeds."""
        for module in _modules_of(self._transformer, self._blocks):
            for hook in _skipping_hooks(module):
                if hook._is_stateful:
                    hook.reset_state(module)

    def _require_known(self, hook: Any) -> None:
        name = type(hook).__name__
        if name not in (DECIDING, *IDENTICAL):
            raise UserError(
                f"db-SP does not know whether a {name} skips the same layers on all ranks, and without that they wait "
                "for each other forever; take it off (transformer.disable_cache())"
            )

    def _cache_dit(self) -> Any:
        """Returns cache-dit's manager of what it has cached of this transformer, if any."""
        attributes = vars(self._transformer)
        return attributes.get("_context_manager") if attributes.get("_is_cached", False) else None

    def _take_over(self, deciding: Any) -> PatchSet:
        patches = PatchSet()
        if type(deciding).__name__ == DECIDING:
            patches.set_attribute(deciding, "_should_compute_remaining_blocks", self._first_block(deciding))
        else:
            patches.on_detach(_JointSimilarity.join(deciding, self._transformer, self._together))
        return patches

    def _first_block(self, hook: Any) -> Callable[[torch.Tensor], bool]:
        """Decides for diffusers' hook whether the change since the last computed pass is above its threshold."""
        if not all(hasattr(hook, name) for name in ("state_manager", "threshold", "_should_compute_remaining_blocks")):
            raise _unknown("diffusers", "first-block cache")

        @torch.compiler.disable
        def should_compute(residual: torch.Tensor) -> bool:
            before = hook.state_manager.get_state().head_block_residual
            if before is None or before.shape != residual.shape:
                return True
            difference, size = self._together.change(before, residual)
            return difference > hook.threshold * size

        return should_compute


class _JointSimilarity:
    """Replaces `similarity` of a manager of cache-dit, which the transformers of a pipeline share.

    Each transformer joins and leaves by itself, in any order; the last leaves the manager as it was. cache-dit's own
    function still decides and keeps its records, but on two numbers, from the tokens of all ranks of the transformer
    whose pass it is. It decides alone for a transformer that has not joined.
    """

    def __init__(self, manager: Any) -> None:
        self._manager, self._original = manager, manager.similarity
        self._ranks: dict[nn.Module, ForwardRanks] = {}

    @classmethod
    def join(cls, manager: Any, transformer: nn.Module, together: ForwardRanks) -> Callable[[], None]:
        """Adds a transformer of the manager's. Returns what takes it off again."""
        needed = ("similarity", "get_important_condition_threshold", "get_context")
        if not all(callable(getattr(manager, name, None)) for name in needed) or not _contexts_of(transformer):
            raise _unknown("cache-dit", "cache")
        joint = vars(manager).get("similarity")
        if not isinstance(joint, cls):
            joint = manager.similarity = cls(manager)
        joint._ranks[transformer] = together
        return functools.partial(joint._leave, transformer)

    def _leave(self, transformer: nn.Module) -> None:
        del self._ranks[transformer]
        if not self._ranks and vars(self._manager).get("similarity") is self:
            del self._manager.similarity

    @torch.compiler.disable
    def __call__(self, t1: torch.Tensor, t2: torch.Tensor, *, parallelized: bool = False, **options: Any) -> bool:
        """Decides whether two tensors are similar, by mean |t1 − t2| / mean |t1|."""
        together = self._ranks_of_pass()
        if together is None:
            similar: bool = self._original(t1, t2, parallelized=parallelized, **options)
            return similar
        if self._manager.get_important_condition_threshold() > 0:
            raise UserError(
                "cache-dit's important_condition_threshold looks for the tokens that matter most among one "
                "rank's; leave it at 0 with db-SP"
            )
        if t1.shape == t2.shape:
            difference, size = together.change(t1, t2)
            t1, t2 = torch.tensor([[size], [size - difference]], dtype=torch.float64, device="cpu")
        similar = self._original(t1, t2, parallelized=False, **options)
        return similar

    def _ranks_of_pass(self) -> ForwardRanks | None:
        """Returns the ranks of the transformer whose cache decides now."""
        context = self._manager.get_context().name
        return next((ranks for part, ranks in self._ranks.items() if context in _contexts_of(part)), None)


def _contexts_of(transformer: nn.Module) -> Sequence[str]:
    """Returns the names of a transformer's caches in cache-dit's manager."""
    names: Sequence[str] = vars(transformer).get("_context_names", ())
    return names


def _unknown(library: str, cache: str) -> UserError:
    return UserError(
        f"db-SP does not know the {cache} in this version of {library}, whose decision all ranks must take together; "
        "disable it, or install a version that db-SP is tested with (constraints.txt)"
    )


def _modules_of(transformer: nn.Module, blocks: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """Modules on which caches are put: the transformer, its blocks and their attentions."""
    yield transformer
    for block in blocks:
        yield block
        yield from block.children()


def _skipping_hooks(module: nn.Module) -> list[Any]:
    """Yields diffusers' hooks on a module that may do something else than call it."""
    registry = getattr(module, "_diffusers_hook", None)
    hooks = getattr(registry, "hooks", {}).values()
    return [hook for hook in hooks if hasattr(hook, "new_forward")]

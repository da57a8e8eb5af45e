"""db-SP in xfuser's Wan transformer, which cuts the sequence into equal shards itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.runtime.session import AttentionSession
from dbsp_core.utils.errors import UserError
from dbsp_diffusers.architectures import architecture_of
from dbsp_diffusers.caching import refuse_step_caches
from dbsp_diffusers.patching import PatchSet, patch_tokens, signature_of, unpatch_tokens

__all__ = ["Branch", "attach_wan", "branch_of_wan"]

Branch = Callable[[], int]
"""Which guidance pass of a step this rank's group is about to run, where each group runs one alone; else 0."""


def branch_of_wan(pipe: Any, guidance: SequenceGroup) -> Branch:
    """xfuser's Wan pipelines run the conditioned pass, then the other; in parallel, the other on the first group."""

    def branch() -> int:
        alone = guidance.size > 1 and getattr(pipe, "do_classifier_free_guidance", False)
        return guidance.size - 1 - guidance.rank if alone else 0

    return branch


def attach_wan(transformer: Any, session: AttentionSession, branch: Branch, attachment: PatchSet) -> None:
    """Puts db-SP where xfuser's USP stands, and lays the sequence out as the configuration wants it.

    transformer: an xFuserWanTransformer3DWrapper
    Raises ValueError when its self-attention is not xfuser's.
    """
    attachment.hook(transformer.register_forward_pre_hook, _Begin(session, branch), with_kwargs=True)
    for layer, block in enumerate(transformer.blocks):
        processor = block.attn1.processor
        if "attention_function" not in vars(processor):
            raise UserError(
                f"self-attention of layer {layer} is computed by a {type(processor).__name__}, which is not xfuser's; "
                "load the transformer anew"
            )
        attachment.set_attribute(processor, "attention_function", LayerAttention(session, layer))
    strategy = session.strategy
    if session.config.effective_layout != "contiguous" and (strategy is None or strategy.ring > 1):
        _lay_out(transformer, session, attachment)  # Ulysses alone has nothing to lay out
    attachment.hook(transformer.register_forward_hook, _End(session, len(transformer.blocks)))


class LayerAttention:
    """Stands in for xfuser's USP in one layer's self-attention."""

    def __init__(self, session: AttentionSession, layer: int) -> None:
        self._session = session
        self._layer = layer

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
        """query, key, value: [B, H, shard, D]; xfuser's options choose among backends that are not used here."""
        return self._session.attend(self._layer, query, key, value)


class _Begin:
    """Before each forward pass: tells the session the size of the video."""

    def __init__(self, session: AttentionSession, branch: Branch) -> None:
        self._session = session
        self._branch = branch

    @torch.compiler.disable
    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        refuse_step_caches(module, module.blocks)
        inputs = signature_of(module).bind(*args, **kwargs).arguments
        thw, _ = architecture_of(module).token_grid(module, inputs)
        device = inputs["hidden_states"].device
        self._session.begin(thw, 0, inputs.get("timestep"), device, branch=self._branch())


class _End:
    """After each forward pass: every layer's attention must have come by."""

    def __init__(self, session: AttentionSession, layers: int) -> None:
        self._session = session
        self._layers = layers

    @torch.compiler.disable
    def __call__(self, module: Any, args: tuple[Any, ...], output: Any) -> None:
        missed = self._layers - self._session.end()
        if missed:
            raise RuntimeError(
                f"{missed} of {self._layers} self-attentions did not reach db-SP; something replaced their processors"
            )


def _lay_out(transformer: Any, session: AttentionSession, attachment: PatchSet) -> None:
    """Shards the sequence in the home layout's order: tokens and rotary table permuted on the way in, undone on the
    way out. xfuser cuts the sequence into equal shards itself, so only the order is ours to choose."""
    patch = transformer.config.patch_size

    def order(device: torch.device) -> torch.Tensor:
        return torch.from_numpy(session.home.order).to(device)

    @torch.compiler.disable
    def permute_tokens(module: Any, args: tuple[Any, ...], embedded: torch.Tensor) -> torch.Tensor:
        return embedded.flatten(2)[:, :, order(embedded.device)].view_as(embedded)

    @torch.compiler.disable
    def permute_rope(module: Any, args: tuple[Any, ...], tables: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return tuple(table[:, order(table.device)] for table in tables)

    @torch.compiler.disable
    def restore(module: Any, args: tuple[Any, ...], output: Any) -> Any:
        sample = output[0]
        tokens = patch_tokens(sample, patch)
        restored = torch.empty_like(tokens)
        restored[:, order(tokens.device)] = tokens
        whole = unpatch_tokens(restored, sample, patch)
        return (whole,) if isinstance(output, tuple) else type(output)(sample=whole)

    attachment.hook(transformer.patch_embedding.register_forward_hook, permute_tokens)
    attachment.hook(transformer.rope.register_forward_hook, permute_rope)
    attachment.hook(transformer.register_forward_hook, restore)

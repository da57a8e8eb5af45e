"""Checks that db-SP computes every self-attention of a transformer in every forward pass.

Otherwise a module would silently attend to the tokens of one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import nn

from dbsp_core.runtime.session import AttentionSession
from dbsp_core.utils.errors import UserError
from dbsp_diffusers.models import architecture_of
from dbsp_diffusers.models.architecture import modules_at
from dbsp_diffusers.packed.samples import PackedBatch
from dbsp_diffusers.patching import PatchSet, has_class_forward, signature_of
from dbsp_diffusers.sharding.attention import require_torch_attention
from dbsp_diffusers.sharding.step_caches import names_of_caches

_CAUSE = (
    "removing an offload hook or device map, a LoRA, a quantizer or a library may have replaced a forward, "
    "processor or layer; make such changes before `enable`, or between `disable` and `enable`"
)


class Coverage:
    """Compares the self-attentions computed by db-SP in a forward pass with the transformer's.

    `reached` returns the layers whose attention db-SP has computed in the current pass. The session's observers hear
    how many attentions a step cache left out.
    """

    def __init__(
        self, transformer: nn.Module, reached: Callable[[], Collection[int]], session: AttentionSession
    ) -> None:
        self._transformer, self._session, self._reached = transformer, session, reached
        self._architecture = architecture_of(transformer)
        self._layers = {attention: layer for layer, attention in enumerate(self._attentions())}
        self._expected: dict[int, nn.Module] = {}  # attention modules that the current pass must reach, by layer

    def attach(self, patches: PatchSet) -> None:
        """Checks every forward pass from now on."""
        transformer = self._transformer
        patches.hook(transformer.register_forward_pre_hook, self._begin, with_kwargs=True, prepend=True)
        shard_plan = self._architecture.shard_plan
        # check before gathering, which is collective
        for path in (*shard_plan.gathered, *shard_plan.gathered_early):
            for module in modules_at(transformer, path):
                patches.hook(module.register_forward_hook, self._require_all, prepend=True)
        patches.hook(transformer.register_forward_hook, self._end)

    @torch.compiler.disable
    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        require_torch_attention()
        try:
            present = self._attentions()
        except AttributeError as error:
            raise UserError(
                f"db-SP does not compute the attention of a layer without one ({error}): {_CAUSE}"
            ) from error
        lost = [attention for attention in present if attention not in self._layers or has_class_forward(attention)]
        if lost:
            raise UserError(f"db-SP does not compute the attention of {self._named(lost)}: {_CAUSE}")
        self._expected = {self._layers[attention]: attention for attention in present}
        if self._architecture.skipped_by and not (args and isinstance(args[0], PackedBatch)):
            for layer in self._architecture.skipped(signature_of(module).bind(*args, **kwargs).arguments):
                self._expected.pop(layer, None)

    def _attentions(self) -> list[nn.Module]:
        """Returns the self-attention module of each layer, without torch.compile's wrapper."""
        attentions = self._architecture.attentions_of(self._transformer)
        return [getattr(attention, "_orig_mod", attention) for attention in attentions]

    @torch.compiler.disable
    def _end(self, *_: Any) -> None:
        missed, observers = self._missed(), self._session.observers
        if observers and names_of_caches(self._transformer, self._architecture.blocks_of(self._transformer)):
            for observer in observers:
                observer.pass_ends(self._session.first_layer, len(missed), len(self._expected))

    @torch.compiler.disable
    def _require_all(self, *_: Any) -> None:
        self._missed()

    def _missed(self) -> list[nn.Module]:
        """Returns the attentions that a cache skipped. Raises UserError unless db-SP has computed all others."""
        reached = self._reached()
        missed = [attention for layer, attention in self._expected.items() if layer not in reached]
        lost = [attention for attention in missed if not names_of_caches(self._transformer, [self._block(attention)])]
        if lost:
            raise UserError(
                f"{len(lost)} of {len(self._expected)} self-attentions did not reach db-SP, {self._named(lost)}: "
                f"{_CAUSE}"
            )
        return missed

    def _block(self, attention: nn.Module) -> nn.Module:
        return self._transformer.get_submodule(self._name(attention).rpartition(".")[0])

    def _named(self, attentions: Iterable[nn.Module]) -> str:
        names = [self._name(attention) for attention in attentions]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return ", ".join(names[:3]) + more

    def _name(self, attention: nn.Module) -> str:
        return next(name for name, module in self._transformer.named_modules() if module is attention)

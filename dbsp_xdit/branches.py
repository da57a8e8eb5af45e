"""Classifier-free-guidance parallelism: the two branches of each step, each on half of the ranks."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from dbsp_core.groups import SequenceGroup
from dbsp_core.hosts import Attachment

__all__ = ["Branch", "branch_of_wan", "split_batch"]

Branch = Callable[[], int]
"""Which guidance pass of a step this rank's group is about to run, where each group runs one alone; else 0."""


def branch_of_wan(pipe: Any, guidance: SequenceGroup) -> Branch:
    """xfuser's Wan pipelines run the conditioned pass, then the other; in parallel, the other on the first group."""

    def branch() -> int:
        alone = guidance.size > 1 and getattr(pipe, "do_classifier_free_guidance", False)
        return guidance.size - 1 - guidance.rank if alone else 0

    return branch


def split_batch(transformer: nn.Module, guidance: SequenceGroup, attachment: Attachment) -> None:
    """Lets each group compute its part of a batch that holds the branches one after the other, and gathers them.

    For stock pipelines that batch their branches, as CogVideoX does. A batch that the groups don't divide is computed
    whole by each of them.
    """
    signature = inspect.signature(transformer.forward)
    whole: list[bool] = []  # of the forward pass under way: whether it was left whole

    @torch.compiler.disable
    def take_part(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        call = signature.bind(*args, **kwargs)
        batch = call.arguments["hidden_states"].shape[0]
        whole[:] = [batch % guidance.size > 0]
        if not whole[0]:
            for name, value in call.arguments.items():
                if isinstance(value, torch.Tensor) and value.ndim and value.shape[0] == batch:
                    call.arguments[name] = value.chunk(guidance.size)[guidance.rank]
        return call.args, call.kwargs

    @torch.compiler.disable
    def gather(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if whole[0]:
            return output
        sample = torch.cat(guidance.all_gather(output[0]))
        return (sample,) if isinstance(output, tuple) else type(output)(sample=sample)

    attachment.hook(transformer.register_forward_pre_hook, take_part, with_kwargs=True)
    attachment.hook(transformer.register_forward_hook, gather)

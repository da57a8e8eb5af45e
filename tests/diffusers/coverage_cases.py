"""What the workers run: transformers on which something takes attention away from db-SP after `enable`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

import dbsp_diffusers
from dbsp_diffusers.sharding.generation_checks import GenerationChecks
from tests.support.models.tiny_pipelines import difference, load
from tests.support.models.transformers_for_tests import Inputs, make_transformer
from tests.support.single_process import attach_single_process

COMPARE = GenerationChecks.compare
CONFIG = {"mask": {"source": "synthetic", "density": 0.3, "block_q": 16, "block_k": 8}}


def said(call: Callable[[], Any]) -> str:
    try:
        call()
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def _inputs() -> dict[str, Any]:
    return Inputs.random("wan", (3, 5, 7), 1, 7).arguments


def _other_attention(transformer: Any) -> None:
    transformer.blocks[1].attn1 = copy.deepcopy(make_transformer("wan").blocks[1].attn1)


def _other_block(transformer: Any) -> None:
    transformer.blocks[0] = make_transformer("wan").blocks[0]


def _appended_block(transformer: Any) -> None:
    transformer.blocks.append(make_transformer("wan").blocks[0])


def _forward_reset(transformer: Any) -> None:
    del transformer.blocks[1].attn1.forward


def _forward_replaced(transformer: Any) -> None:
    attention = transformer.blocks[1].attn1
    attention.forward = type(attention).forward.__get__(attention).__call__


def _block_skipped(transformer: Any) -> None:
    transformer.blocks[1].forward = lambda hidden, *_, **__: hidden


CHANGES = {
    "other attention": _other_attention,
    "other block": _other_block,
    "appended block": _appended_block,
    "forward reset": _forward_reset,
    "forward replaced": _forward_replaced,
    "block skipped": _block_skipped,
}


LAYERS_CHANGED = ("other attention", "other block", "appended block")
"""Changes after which a transformer can be enabled anew; the others hide a layer from any wrapper."""


def changed(rank: int, world: int, change: str) -> tuple[str, float]:
    """Changes a transformer after `enable`.

    Returns its error message, and its difference from one process once enabled anew, or 0 if `change` hides a layer.
    """
    transformer, inputs = make_transformer("wan"), _inputs()
    with torch.no_grad():
        dbsp_diffusers.enable(transformer, CONFIG)
        transformer(**inputs)
        CHANGES[change](transformer)
        text = said(lambda: transformer(**inputs))
        dbsp_diffusers.disable(transformer)
        if change not in LAYERS_CHANGED:
            return text, 0.0
        single = attach_single_process(transformer, CONFIG)
        expected = transformer(**inputs)[0]
        single.detach()
        dbsp_diffusers.enable(transformer, CONFIG)
        found = transformer(**inputs)[0]
        dbsp_diffusers.disable(transformer)
    return text, difference(found, expected)


def hooks_removed(rank: int, world: int) -> list[float]:
    """Differences from one process with accelerate's hooks, once they are removed, and after `disable` from dense."""
    from accelerate import dispatch_model
    from accelerate.hooks import remove_hook_from_module

    transformer, inputs, found = make_transformer("wan"), _inputs(), []
    with torch.no_grad():
        dense = transformer(**inputs)[0]
        single = attach_single_process(transformer, CONFIG)
        expected = transformer(**inputs)[0]
        single.detach()
        parts = {name: "cpu" for name, part in transformer.named_modules() if name and not list(part.children())}
        dispatch_model(transformer, {"": "cpu"} | parts, main_device="cpu", force_hooks=True)
        for attention in (block.attn1 for block in transformer.blocks):
            assert hasattr(attention, "_old_forward")
        dbsp_diffusers.enable(transformer, CONFIG)
        found.append(difference(transformer(**inputs)[0], expected))
        remove_hook_from_module(transformer, recurse=True)
        found.append(difference(transformer(**inputs)[0], expected))
        dbsp_diffusers.disable(transformer)
        found.append(difference(transformer(**inputs)[0], dense))
    return found


def failed_on_all(rank: int, world: int, guidance: bool) -> tuple[str, list[bool]]:
    """Five passes of one generation, of which the third fails: its error, and which passes compared their inputs."""
    transformer, inputs = make_transformer("wan"), _inputs() | {"return_dict": True}
    dbsp_diffusers.enable(transformer, CONFIG, guidance=guidance)
    compared: list[bool] = []
    error = ""

    def run_out_of_memory(*_: Any, **__: Any) -> torch.Tensor:
        raise RuntimeError("out of memory")

    with (
        torch.no_grad(),
        mock.patch.object(GenerationChecks, "compare", autospec=True, side_effect=COMPARE) as compare,
    ):
        for number in range(5):
            if number == 2:
                transformer.blocks[1].forward = run_out_of_memory
            before = compare.call_count
            try:
                transformer(**inputs)
            except RuntimeError as raised:
                error = f"{type(raised).__name__}: {raised}"
                del transformer.blocks[1].forward
            compared.append(compare.call_count > before)
    dbsp_diffusers.disable(transformer)
    return error, compared


def exchanged(rank: int, world: int, folder: str, everywhere: bool) -> tuple[str, str, str]:
    """(what a pipeline says whose transformer was exchanged, on all ranks or on the last, once it is back, and once
    db-SP is disabled with another)"""
    pipe = load("wan", folder)
    dbsp_diffusers.enable(pipe, CONFIG)
    own = pipe.transformer
    size = {"height": 64, "width": 96, "num_frames": 9, "num_inference_steps": 1, "max_sequence_length": 16}
    if everywhere or rank == world - 1:
        pipe.transformer = load("wan", folder).transformer
    first = said(lambda: pipe("a", output_type="latent", **size))
    pipe.transformer = own
    second = said(lambda: pipe("a", output_type="latent", **size))
    pipe.transformer = load("wan", folder).transformer
    dbsp_diffusers.disable(pipe)
    third = said(lambda: pipe("a", output_type="latent", **size))
    assert not vars(own).keys() & {"_dbsp", "_is_parallelized"}
    return first, second, third


LORA_TARGETS = {
    "attention": ["to_q", "to_v"],
    "output": ["proj_out"],
    "embedding": ["patch_embedding"],
    "all": ["to_q", "to_out.0", "proj_out", "patch_embedding", "ffn.net.2", "time_embedder.linear_1"],
}


def lora_after_enable(rank: int, world: int, targets: str) -> list[float]:
    """Differences from one process with a LoRA, without it again, and after `disable` from it with none."""
    from peft import LoraConfig

    def adapted(enabled: bool) -> list[torch.Tensor]:
        transformer, inputs, found = make_transformer("wan"), _inputs(), []
        single = None if enabled else attach_single_process(transformer, CONFIG)
        if enabled:
            dbsp_diffusers.enable(transformer, CONFIG)
        torch.manual_seed(1)
        transformer.add_adapter(LoraConfig(r=2, target_modules=LORA_TARGETS[targets], init_lora_weights=False))
        found.append(transformer(**inputs)[0])
        transformer.unload_lora() if hasattr(transformer, "unload_lora") else transformer.disable_adapters()
        found.append(transformer(**inputs)[0])
        if single is not None:
            single.detach()
        dbsp_diffusers.disable(transformer)
        found.append(transformer(**inputs)[0])
        return found

    with torch.no_grad():
        return [difference(one, other) for one, other in zip(adapted(True), adapted(False), strict=True)]


def layer_skip(rank: int, world: int) -> tuple[float, float]:
    """(difference from one process of a transformer whose first block diffusers skips, from one with both blocks)"""
    from diffusers import LayerSkipConfig
    from diffusers.hooks import apply_layer_skip

    transformer, inputs = make_transformer("wan"), _inputs()
    with torch.no_grad():
        whole = transformer(**inputs)[0]
        apply_layer_skip(transformer, LayerSkipConfig(indices=[0], fqn="blocks"))
        single = attach_single_process(transformer, CONFIG)
        expected = transformer(**inputs)[0]
        single.detach()
        dbsp_diffusers.enable(transformer, CONFIG)
        found = transformer(**inputs)[0]
        dbsp_diffusers.disable(transformer)
    return difference(found, expected), difference(found, whole)

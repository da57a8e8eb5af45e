"""db-SP on device meshes, and what it rejects, on all ranks identically and without a trace."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import dbsp_diffusers
from dbsp_core.utils.errors import UserError
from tests.diffusers.models.model_cases import MASKS
from tests.support.models.tiny_pipelines import fingerprint
from tests.support.models.tiny_transformers import make_tiny_transformer, tiny_inputs
from tests.support.outcomes import alone, assert_near, outputs, said


def enable_parallelism(transformer: Any) -> None:
    from diffusers import ContextParallelConfig

    # diffusers asks torch for an accelerator, which this machine may not have
    device = mock.patch.object(torch._C, "_get_accelerator", return_value=torch.device("cpu"))
    with mock.patch.object(torch.accelerator, "device_count", return_value=8), device:
        transformer.enable_parallelism(config=ContextParallelConfig(ulysses_degree=2))


@torch.no_grad()
def run_mesh(rank: int, world: int) -> None:
    """Runs ranks of a mesh that also has a data dimension: each pair has another sample."""
    transformer, config = make_tiny_transformer("wan"), {"mask": MASKS["sparge"]}
    mesh = dist.init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("fsdp", "ring"))
    mine, other = (tiny_inputs("wan", seed=mesh["fsdp"].get_local_rank() ^ pair) for pair in (0, 1))
    expected = [alone(transformer, inputs, config) for inputs in (mine, other)]
    session = dbsp_diffusers.enable(transformer, config, mesh=mesh)
    assert str(session.strategy) == "U1R2"
    assert_near(outputs(transformer, mine), *expected)
    dbsp_diffusers.disable(transformer)


def test_mesh_with_other_dimensions_is_accepted(pool):
    pool(4).run(run_mesh)


def _enable_parallelism_after(transformer: Any) -> None:
    own = make_tiny_transformer("wan")
    dbsp_diffusers.enable(own, {"mask": MASKS["synthetic"]})
    enable_parallelism(own)
    with torch.no_grad():
        own(**tiny_inputs("wan"))


def _enable_parallelism_before(transformer: Any) -> None:
    second = make_tiny_transformer("wan")
    enable_parallelism(second)
    dbsp_diffusers.enable(SimpleNamespace(transformer=transformer, transformer_2=second))


def _processor_past_torch(transformer: Any) -> None:
    dbsp_diffusers.enable(transformer, {"mask": MASKS["synthetic"]})
    attentions = [block.attn1 for block in transformer.blocks]
    own = [attention.processor for attention in attentions]
    for attention in attentions:
        attention.processor = lambda attn, hidden_states, *_, **__: hidden_states
    try:
        with torch.no_grad():
            transformer(**tiny_inputs("wan"))
    finally:
        for attention, processor in zip(attentions, own, strict=True):
            attention.processor = processor


def _half_way(transformer: Any) -> None:
    """Changes all blocks but the last, which cannot be changed."""
    last = transformer.blocks[-1].attn1

    def set_attribute(self: torch.nn.Module, name: str, value: Any) -> None:
        if self is last:
            raise UserError("this part cannot be changed")
        torch.nn.Module.__setattr__(self, name, value)

    with mock.patch.object(type(last), "__setattr__", set_attribute):
        dbsp_diffusers.enable(transformer)


def _of_xdit(transformer: Any) -> None:
    own = make_tiny_transformer("wan")
    own.__class__ = type("xFuserWanTransformer3DWrapper", (type(own),), {})
    dbsp_diffusers.enable(own)


def _mesh(names: tuple[str, ...] | None, **options: Any) -> Callable[[Any], object]:
    def enable(transformer: Any) -> None:
        mesh = dist.init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=names)
        dbsp_diffusers.enable(transformer, mesh=mesh, **options)

    return enable


MISTAKES: dict[str, tuple[Callable[[Any], object], str]] = {
    "xDiT's transformer": (_of_xdit, "use dbsp_xdit.attach"),
    "enable_parallelism before": (_enable_parallelism_before, 'call dbsp_diffusers.enable(pipe, strategy="UxRy")'),
    "enable_parallelism afterwards": (_enable_parallelism_after, "enable db-SP alone"),
    "a processor past torch's attention": (_processor_past_torch, "keep to attention backend 'native'"),
    "a failure half-way": (_half_way, "cannot be changed"),
    "a mesh without names": (_mesh(None), "mesh must be a device mesh with a dimension ring or ulysses"),
    "not a mesh": (lambda one: dbsp_diffusers.enable(one, mesh=(1, 2)), "got a tuple"),
    "a mesh without our dimensions": (
        _mesh(("data", "tensor")),
        "a dimension ring or ulysses, got dimensions data, tensor",
    ),
    "a mesh in another order": (_mesh(("ulysses", "ring")), "ring must come before ulysses"),
    "a mesh and a group": (_mesh(("data", "ring"), group=True), "mesh and group both set the ranks that share a"),
}
"""What is done to a Wan, and the error message."""

CONTROL = {"control_hidden_states": torch.zeros(2, 6, 2, 10, 14)}
TWO_LENGTHS = {"encoder_attention_mask": torch.tensor([[1] * 9 + [0] * 4, [1] * 8 + [0] * 5])}
WITHIN_TEXT = {"encoder_hidden_states_mask": torch.tensor([[1, 0] * 6 + [1]] * 2)}
TWO_IMAGES = {"img_ids": torch.cat([torch.zeros(3, 3), torch.ones(32, 3)])}
PADDING = {"encoder_attention_mask": torch.eye(13)[:2].bool()}
NO_TEXT = {"encoder_attention_mask": torch.zeros(2, 10), "encoder_attention_mask_2": torch.zeros(2, 6)}
BETWEEN_TOKENS = {"video_self_attention_mask": torch.ones(2, 105, 105)}
UNSUPPORTED: dict[str, tuple[str, dict[str, Any], str]] = {
    "token_replace": ("hunyuan", {}, "with image_condition_type token_replace"),
    "a causal mask": ("skyreels", {}, "already has a causal mask"),
    "diffusion forcing": ("skyreels", {"enable_diffusion_forcing": True}, "with enable_diffusion_forcing"),
    "a control video of another size": ("vace", CONTROL, "the control video has latents of (2, 10, 14)"),
    "texts of two lengths": ("hunyuan", TWO_LENGTHS, "differ in length"),
    "text without tokens": ("hunyuan1.5", NO_TEXT, "the prompt has no tokens"),
    "padding within text": ("qwen", WITHIN_TEXT, "differ in length, or have padding before their end"),
    "a size that makes no tokens": ("ltx", {"num_frames": 4}, "must make the 105 tokens of hidden_states"),
    "an image next to the image": ("flux", TWO_IMAGES, "img_ids is not one grid of tokens"),
    "an edited image": ("qwen", {"img_shapes": [[(1, 5, 4), (1, 5, 3)]] * 2}, "img_shapes is not one grid of tokens"),
    "a mask between tokens": ("ltx2", BETWEEN_TOKENS, "with video_self_attention_mask"),
    "padding at different positions": ("krea2", PADDING, "the texts of one batch differ in length"),
}
"""A model, inputs of a pass that are not the usual ones, and the error message."""
SIZES: dict[str, dict[str, Any]] = {
    "token_replace": {"image_condition_type": "token_replace"},
    "a causal mask": {"num_frame_per_block": 3},
}
"""With which the model is made."""


def run_mistake(rank: int, world: int, name: str) -> None:
    model, inputs, message = UNSUPPORTED.get(name, ("wan", {}, ""))
    transformer = make_tiny_transformer(model, **SIZES.get(name, {}))
    before = fingerprint(transformer)

    def unsupported_pass(transformer: Any) -> None:
        dbsp_diffusers.enable(transformer, {"mask": MASKS["synthetic"]})
        with torch.no_grad():
            transformer(**tiny_inputs(model, batch=2) | inputs)

    action, message = MISTAKES.get(name, (unsupported_pass, message))
    answer = said(lambda: action(transformer))
    dbsp_diffusers.disable(transformer)
    assert fingerprint(transformer) == before, "left something behind"
    assert answer.startswith("UserError: "), answer
    assert message in answer, answer
    assert "\n" not in answer


@pytest.mark.parametrize("name", [*MISTAKES, *UNSUPPORTED])
def test_mistakes_are_rejected_on_all_ranks_in_one_line(pool, name):
    pool(2).run(run_mistake, name)

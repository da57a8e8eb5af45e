"""What the workers run: db-SP on device meshes, and mistakes that it must reject on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import dbsp_diffusers
from tests.diffusers.models.model_cases import MASKS, apart, outputs
from tests.support.models.tiny_transformers import make_tiny_transformer, tiny_inputs
from tests.support.single_process import attach_single_process


@contextmanager
def an_accelerator() -> Iterator[None]:
    """diffusers asks torch for one, which this machine may not have."""
    device = mock.patch.object(torch._C, "_get_accelerator", return_value=torch.device("cpu"))
    with mock.patch.object(torch.accelerator, "device_count", return_value=8), device:
        yield


def enable_parallelism(transformer: Any, **degrees: Any) -> None:
    from diffusers import ContextParallelConfig

    with an_accelerator():
        transformer.enable_parallelism(config=ContextParallelConfig(**degrees))


def run_mesh(rank: int, world: int) -> tuple[str, list[float]]:
    """Ranks of a mesh that also has a data dimension: each pair runs another sample. returns: the strategy, the
    difference of this rank's from one process, and from the other pair's."""
    transformer = make_tiny_transformer("wan")
    mesh = dist.init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("fsdp", "ring"))
    config = {"mask": MASKS["sparge"]}
    mine, other = (tiny_inputs("wan", seed=mesh["fsdp"].get_local_rank() ^ pair) for pair in (0, 1))
    with torch.no_grad():
        single = attach_single_process(transformer, config)
        expected = [outputs(transformer, inputs) for inputs in (mine, other)]
        single.detach()
        session = dbsp_diffusers.enable(transformer, config, mesh=mesh)
        out = outputs(transformer, mine)
        dbsp_diffusers.disable(transformer)
    return str(session.strategy), [apart(out, one) for one in expected]


class Pipe:
    """A stub of a pipeline."""

    def __init__(self, **parts: Any) -> None:
        vars(self).update(parts)


def _twice(rank: int) -> None:
    transformer = make_tiny_transformer("wan")
    dbsp_diffusers.enable(transformer)
    dbsp_diffusers.enable(transformer)


def _enable_parallelism_after(rank: int) -> None:
    transformer = make_tiny_transformer("wan")
    dbsp_diffusers.enable(transformer, {"mask": MASKS["synthetic"]})
    enable_parallelism(transformer, ulysses_degree=2)
    with torch.no_grad():
        transformer(**tiny_inputs("wan"))


def _useless_mesh(rank: int) -> None:
    mesh = dist.init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("data", "tensor"))
    dbsp_diffusers.enable(make_tiny_transformer("wan"), mesh=mesh)


def _crossed_mesh(rank: int) -> None:
    mesh = dist.init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("ulysses", "ring"))
    dbsp_diffusers.enable(make_tiny_transformer("wan"), mesh=mesh)


def _mesh_and_group(rank: int) -> None:
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ring",))
    dbsp_diffusers.enable(make_tiny_transformer("wan"), mesh=mesh, group=dist.group.WORLD)


def _enable_parallelism_before(rank: int) -> None:
    pipe = Pipe(transformer=make_tiny_transformer("wan"), transformer_2=make_tiny_transformer("wan"))
    enable_parallelism(pipe.transformer_2, ulysses_degree=2)
    dbsp_diffusers.enable(pipe)


def _pass(model: str, options: dict[str, Any], **inputs: Any) -> Callable[[int], None]:
    """A pass of a model made with other options, with other inputs."""

    def run(rank: int) -> None:
        transformer = make_tiny_transformer(model, **options)
        dbsp_diffusers.enable(transformer, {"mask": MASKS["synthetic"]})
        with torch.no_grad():
            transformer(**tiny_inputs(model, batch=2) | inputs)

    return run


def _unknown(cls: str) -> Callable[[int], None]:
    return lambda rank: dbsp_diffusers.enable(type(cls, (torch.nn.Module,), {})()) and None


def _config(config: dict[str, Any]) -> Callable[[int], None]:
    return lambda rank: dbsp_diffusers.enable(make_tiny_transformer("wan"), config) and None


MISTAKES: dict[str, tuple[Callable[[int], None], str]] = {
    "an unknown class": (_unknown("Mystery3DModel"), "does not know Mystery3DModel; it knows WanTransformer3DModel, "),
    "audio that attends to video": (_unknown("Kandinsky6Transformer3DModel"), "audio and video attend"),
    "token_replace": (
        _pass("hunyuan", {"image_condition_type": "token_replace"}),
        "with image_condition_type token_replace",
    ),
    "a causal mask": (_pass("skyreels", {"num_frame_per_block": 3}), "causal mask of its own"),
    "diffusion forcing": (_pass("skyreels", {}, enable_diffusion_forcing=True), "with enable_diffusion_forcing"),
    "enable_parallelism before": (_enable_parallelism_before, 'call dbsp_diffusers.enable(pipe, strategy="UxRy")'),
    "enable_parallelism afterwards": (_enable_parallelism_after, "enable db-SP alone"),
    "a second enable": (_twice, "parallelized already"),
    "a mesh without our dimensions": (_useless_mesh, "a dimension ring or ulysses, got dimensions data, tensor"),
    "a mesh in another order": (_crossed_mesh, "ring must come before ulysses"),
    "a mesh and a group": (_mesh_and_group, "mesh and group both name the ranks that share a sequence"),
    "degrees that don't multiply": (_config({"strategy": "U3R1"}), "U3R1"),
    "report for one transformer": (
        _config({"transformer_2": {"report": "x"}}),
        "'report' in 'transformer_2' is for both transformers",
    ),
    "an unknown key for the second": (_config({"transformer_2": {"masc": {}}}), "did you mean 'mask'"),
    "a control video of another size": (
        _pass("vace", {}, control_hidden_states=torch.zeros(2, 6, 2, 10, 14)),
        "the control video has latents of (2, 10, 14)",
    ),
    "texts of two lengths": (
        _pass("hunyuan", {}, encoder_attention_mask=torch.tensor([[1] * 9 + [0] * 4, [1] * 8 + [0] * 5])),
        "differ in length",
    ),
    "padding within text": (
        _pass("qwen", {}, encoder_hidden_states_mask=torch.tensor([[1, 0] * 6 + [1]] * 2)),
        "differ in length, or have padding before their end",
    ),
    "a size that makes no tokens": (_pass("ltx", {}, num_frames=4), "must make the 105 tokens of hidden_states"),
    "an image next to the image": (
        _pass("flux", {}, img_ids=torch.cat([torch.zeros(3, 3), torch.ones(32, 3)])),
        "img_ids is not one grid of tokens",
    ),
    "an edited image next to the image": (
        _pass("qwen", {}, img_shapes=[[(1, 5, 4), (1, 5, 3)]] * 2),
        "img_shapes is not one grid of tokens",
    ),
    "images of two sizes": (_pass("qwen", {}, img_shapes=[[(1, 5, 7)], [(1, 7, 5)]]), "the same for all items"),
    "a mask between tokens": (
        _pass("ltx2", {}, video_self_attention_mask=torch.ones(2, 105, 105)),
        "with video_self_attention_mask",
    ),
    "padding at different positions": (
        _pass("krea2", {}, encoder_attention_mask=torch.eye(13)[:2].bool()),
        "the texts of one batch differ in length",
    ),
}


def run_mistake(rank: int, world: int, name: str) -> str:
    try:
        MISTAKES[name][0](rank)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"

"""LightX2V's models besides Wan, tiny: how each is made and called, and where its tokens are in one process.

Real: weights as they are loaded, what is before, in and after the blocks, and sharding; the schedulers of MiniMax-H3
and LTX-2. For the others a namespace stands with what is read of them.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F

from scripts.checks.engines.reference import TorchInFloat32, fill, random
from scripts.checks.engines.runs import HEAD, LAYERS, STEPS, Case

TEXT, SHARE = 7, 16  # tokens of the text, and channels of one
Grid = tuple[int, int, int]
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Model:
    """Construction and call of one class.

    tokens: int64, positions in the sequence of one process of text, then video; and how many are text
    """

    cls: str  # it, as "package.module:Class" below LightX2V's networks
    config: Callable[[int], dict[str, Any]]  # its settings, with so many heads
    shapes: Callable[[int], Shapes]  # those of its checkpoint's tensors
    scheduler: Callable[[dict[str, Any], Grid, int], Any]  # that of a denoising: (settings, thw, number of the size)
    call: Callable[[Any, Grid, int, int, int], torch.Tensor]  # one pass: (model, thw, number, step, CFG pass)
    attentions: Callable[[Any], list[Any]]  # attentions of the layers in order, of the model's weights
    tokens: Callable[[Grid], tuple[torch.Tensor, int]]

    def make(self, case: Case, config: dict[str, Any]) -> Any:
        """Makes the model of the case's number of heads, from tensors that are drawn."""
        name, _, cls_name = self.cls.partition(":")
        module = importlib.import_module(f"lightx2v.models.networks.{name}")
        cls = getattr(module, cls_name)
        generator = torch.Generator().manual_seed(0)
        tensors = {name: fill(name, shape, generator) for name, shape in sorted(self.shapes(case.heads).items())}
        with (
            mock.patch.object(cls, "_load_ckpt", return_value=tensors),
            mock.patch.object(module, "GET_DTYPE", return_value=torch.bfloat16, create=True),  # H3 insists on it
        ):
            model = cls(model_path="", config=config, device=torch.device("cpu"))
        for part in (model.pre_weight, model.transformer_weights, getattr(model, "post_weight", None)):
            if part is not None:
                part.to_cuda()
        return model

    def denoise(self, case: Case, config: dict[str, Any], attend: Callable[..., torch.Tensor] | None) -> list[Any]:
        """Returns the outputs of all sizes, steps and CFG passes, by `attend` where it is given."""
        model, outputs = self.make(case, config), []
        for number, thw in enumerate(case.sizes):
            if attend is not None:
                for layer, attention in enumerate(self.attentions(model.transformer_weights)):
                    attention.apply = self._under(attend, layer, thw)
            scheduler = self.scheduler(config, thw, number)
            model.set_scheduler(scheduler)
            for scheduler.step_index in range(STEPS):
                for branch in range(case.passes):
                    scheduler.infer_condition = branch == 0
                    outputs.append(self.call(model, thw, number, scheduler.step_index, branch).flatten().clone())
        return outputs

    def _under(self, attend: Callable[..., torch.Tensor], layer: int, thw: Grid) -> Callable[..., torch.Tensor]:
        positions, text = self.tokens(thw)

        def apply(q: Any, k: Any, v: Any, **_: Any) -> torch.Tensor:
            q, k, v = (each.reshape(1, -1, *each.shape[-2:]) for each in (q, k, v))
            out = torch.empty_like(q)
            out[:, positions] = attend(layer, thw, *(each[:, positions] for each in (q, k, v)), text=text)
            return out[0].flatten(1)

        return apply


def linear(name: str, out: int, inputs: int, bias: bool = True) -> Shapes:
    return {f"{name}.weight": (out, inputs)} | ({f"{name}.bias": (out,)} if bias else {})


def _text_first(text: int) -> Callable[[Grid], tuple[torch.Tensor, int]]:
    return lambda thw: (torch.arange(text + math.prod(thw)), text)


def _text_last(thw: Grid, text: int) -> tuple[torch.Tensor, int]:
    video = math.prod(thw)
    return torch.cat([video + torch.arange(text), torch.arange(video)]), text


def _of_diffusers(cls: str, **sizes: Any) -> Shapes:
    """Shapes of a checkpoint that LightX2V reads as diffusers' class of that name has it."""
    import diffusers

    with torch.device("meta"):
        model = getattr(diffusers, cls)(**sizes)
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def sharded(config: dict[str, Any], rows: torch.Tensor) -> torch.Tensor:
    """Returns this rank's rows, padded as LightX2V's schedulers do."""
    if not config["seq_parallel"]:
        return rows
    group = config["device_mesh"].get_group(mesh_dim="seq_p")
    ranks = dist.get_world_size(group)
    padded = F.pad(rows, (0, 0, 0, -len(rows) % ranks))
    return padded.chunk(ranks)[dist.get_rank(group)]


def _time(step: int) -> torch.Tensor:
    return random(500 + step, 1, 256)


# ---- MiniMax-H3 ----
H3_FRAMES = 124
H3_LATENTS, H3_AUDIO = 37, 2 * 207  # frames of its shortest video, and tokens of its sound in two channels


def _h3_config(heads: int) -> dict[str, Any]:
    sizes = {"num_attention_heads": heads, "attention_head_dim": HEAD, "hidden_size": heads * HEAD}
    sizes |= {"ffn_hidden_size": 48, "num_layers": LAYERS, "num_refiner_layers": 1, "freq_dim": 32, "rope_freq_dim": 4}
    return sizes | {"model_cls": "minimax_h3", "task": "t2av", "infer_steps": STEPS + 1}


def _h3_shapes(heads: int) -> Shapes:
    width, shapes = heads * HEAD, {}
    for block in ["token_refiner.refiner_blocks.0", *(f"transformer_blocks.{layer}" for layer in range(LAYERS))]:
        for name in ("to_q", "to_k", "to_v", "to_out.0"):
            shapes |= linear(f"{block}.attn.{name}", width, width, bias=False)
        shapes |= {f"{block}.attn.norm_{name}.weight": (HEAD,) for name in ("q", "k")}
        shapes |= {f"{block}.norm{number}.weight": (width,) for number in (1, 2)}
        shapes |= linear(f"{block}.ff.net.0.proj", 96, width, bias=False)
        shapes |= linear(f"{block}.ff.net.2", width, 48, bias=False)
        if block.startswith("transformer"):
            shapes |= linear(f"{block}.adaln_proj.linear", 18 * width, width)
    shapes |= linear("proj_in", width, 96) | linear("audio_proj_in", width, 32) | linear("proj_out", 96, width)
    shapes |= linear("audio_proj_out", 32, width) | linear("context_embedder", width, SHARE)
    shapes |= linear("time_embedder.linear_1", width, 32) | linear("time_embedder.linear_2", width, width)
    shapes |= linear("norm_out.linear", 2 * width, width)
    return shapes | {"token_refiner.final_norm.weight": (width,), "norm_out.norm.weight": (width,)}


def _h3_scheduler(config: dict[str, Any], thw: Grid, number: int) -> Any:
    from lightx2v.models.schedulers.minimax_h3.scheduler import MiniMaxH3Scheduler

    scheduler = MiniMaxH3Scheduler(config)
    scheduler.prepare(number, H3_FRAMES, 32 * thw[1], 32 * thw[2], torch.ones(TEXT, dtype=torch.long))
    return scheduler


def _call_h3(model: Any, thw: Grid, number: int, step: int, branch: int) -> torch.Tensor:
    model.scheduler.step_pre(step)
    output = model._infer_cond_uncond({"text_encoder_output": {"prompt_embeds": random(number, TEXT, SHARE)}})
    return torch.cat([output.video.flatten(), output.audio.flatten()])


# ---- HunyuanVideo-1.5 ----
HUNYUAN_TEXT = TEXT - 2 + 3 + 4  # valid tokens of two texts and of an image


def _hunyuan_config(heads: int) -> dict[str, Any]:
    sizes = {"heads_num": heads, "hidden_size": heads * HEAD, "mm_double_blocks_depth": LAYERS, "out_channels": 4}
    sizes |= {"patch_size": (1, 1, 1), "rope_dim_list": [8, 8, 8], "rope_theta": 256, "is_sr_running": False}
    return sizes | {"model_cls": "hunyuan_video_1.5", "task": "t2v"}


def _hunyuan_shapes(heads: int) -> Shapes:
    width = heads * HEAD
    shapes: Shapes = {"img_in.proj.weight": (width, 9, 1, 1, 1), "img_in.proj.bias": (width,)}
    for name in ("time_in.mlp", "txt_in.t_embedder.mlp"):
        shapes |= linear(f"{name}.0", width, 256) | linear(f"{name}.2", width, width)
    shapes |= linear("txt_in.c_embedder.linear_1", width, SHARE) | linear("txt_in.c_embedder.linear_2", width, width)
    shapes |= linear("txt_in.input_embedder", width, SHARE) | {"cond_type_embedding.weight": (3, width)}
    for number in range(2):
        block = f"txt_in.individual_token_refiner.blocks.{number}"
        shapes |= linear(f"{block}.self_attn_qkv", 3 * width, width) | linear(f"{block}.self_attn_proj", width, width)
        shapes |= linear(f"{block}.mlp.fc1", 48, width) | linear(f"{block}.mlp.fc2", width, 48)
        shapes |= linear(f"{block}.adaLN_modulation.1", 2 * width, width)
        shapes |= {f"{block}.norm{norm}.{kind}": (width,) for norm in (1, 2) for kind in ("weight", "bias")}
    for layer in range(LAYERS):
        for stream in ("img", "txt"):
            block = f"double_blocks.{layer}.{stream}"
            shapes |= linear(f"{block}_mod.linear", 6 * width, width)
            for name in ("q", "k", "v", "proj"):
                shapes |= linear(f"{block}_attn_{name}", width, width)
            shapes |= {f"{block}_attn_{name}_norm.weight": (HEAD,) for name in ("q", "k")}
            shapes |= linear(f"{block}_mlp.fc1", 48, width) | linear(f"{block}_mlp.fc2", width, 48)
    return shapes | linear("final_layer.adaLN_modulation.1", 2 * width, width) | linear("final_layer.linear", 4, width)


def _hunyuan_scheduler(config: dict[str, Any], thw: Grid, number: int) -> Any:
    from lightx2v.models.networks.hunyuan_video.infer import pre_infer

    pre_infer.torch = TorchInFloat32()
    latents, timesteps = random(1000 * number, 1, 4, *thw), 900.0 - 300 * torch.arange(STEPS)
    conditions = {"cond_latents_concat": torch.zeros(1, 4, *thw), "mask_concat": torch.zeros(1, 1, *thw)}
    return _namespace(config, latents=latents, timesteps=timesteps, **conditions)


def _call_hunyuan(model: Any, thw: Grid, number: int, step: int, branch: int) -> torch.Tensor:
    width = model.config["hidden_size"]
    text = [random(branch, 1, TEXT, SHARE), torch.arange(TEXT)[None] < TEXT - 2]
    texts = {"context": text, "context_null": text, "byt5_features": random(100 + branch, 1, 5, width)}
    texts["byt5_masks"] = torch.arange(5)[None] < 3
    image = {"siglip_output": random(200, 1, 4, width), "siglip_mask": torch.ones(1, 4)}
    inputs = {"text_encoder_output": texts, "image_encoder_output": image}
    output: torch.Tensor = model._infer_cond_uncond(inputs, branch == 0)
    return output


# ---- LTX-2 ----
LTX2_AUDIO_HEAD = 12


def _ltx2_config(heads: int) -> dict[str, Any]:
    sizes = {"num_attention_heads": heads, "attention_head_dim": HEAD, "num_layers": LAYERS, "fps": 24}
    sizes |= {"audio_num_attention_heads": heads, "audio_attention_head_dim": LTX2_AUDIO_HEAD}
    sizes |= {"audio_cross_attention_dim": heads * LTX2_AUDIO_HEAD, "audio_pos_embed_max_pos": 20}
    sizes |= {"timestep_scale_multiplier": 1000, "av_ca_timestep_scale_multiplier": 1}
    sizes |= {"sample_shift": [2.05, 0.95], "sample_guide_scale": 1.0, "distilled_sigma_values": [1.0, 0.7, 0.4, 0.0]}
    return sizes | {"rope_type": "torch_real_rope", "model_cls": "ltx2", "task": "t2av"}


def _ltx2_shapes(heads: int) -> Shapes:
    video, audio, shapes = heads * HEAD, heads * LTX2_AUDIO_HEAD, {}
    streams = {"": (video, 8, "video", "a2v"), "audio_": (audio, 6, "audio", "v2a")}
    for stream, (width, channels, name, gate) in streams.items():
        shapes |= linear(f"{stream}patchify_proj", width, channels) | linear(f"{stream}proj_out", channels, width)
        shapes |= linear(f"{stream}caption_projection.linear_1", width, SHARE)
        shapes |= linear(f"{stream}caption_projection.linear_2", width, width)
        shapes |= {f"{stream}scale_shift_table": (2, width)}
        times = {f"{stream}adaln_single": 6, f"av_ca_{name}_scale_shift_adaln_single": 4}
        for prefix, parts in (times | {f"av_ca_{gate}_gate_adaln_single": 1}).items():
            shapes |= linear(f"{prefix}.emb.timestep_embedder.linear_1", width, 256)
            shapes |= linear(f"{prefix}.emb.timestep_embedder.linear_2", width, width)
            shapes |= linear(f"{prefix}.linear", parts * width, width)
    attentions = {"attn1": (video, video, video), "attn2": (video, video, video)}  # width of q, of k and v, inside
    attentions |= {"audio_attn1": (audio, audio, audio), "audio_attn2": (audio, audio, audio)}
    attentions |= {"audio_to_video_attn": (video, audio, audio), "video_to_audio_attn": (audio, video, audio)}
    for block in (f"transformer_blocks.{layer}" for layer in range(LAYERS)):
        for name, (queries, keys, inside) in attentions.items():
            shapes |= linear(f"{block}.{name}.to_q", inside, queries) | linear(f"{block}.{name}.to_k", inside, keys)
            shapes |= linear(f"{block}.{name}.to_v", inside, keys) | linear(
                f"{block}.{name}.to_out.0", queries, inside
            )
            shapes |= {f"{block}.{name}.{norm}_norm.weight": (inside,) for norm in ("q", "k")}
        for stream, (width, _, name, _) in streams.items():
            shapes |= linear(f"{block}.{stream}ff.net.0.proj", 48, width) | linear(
                f"{block}.{stream}ff.net.2", width, 48
            )
            shapes |= {f"{block}.{stream}scale_shift_table": (6, width)}
            shapes |= {f"{block}.scale_shift_table_a2v_ca_{name}": (5, width)}
    return {f"model.diffusion_model.{name}": shape for name, shape in shapes.items()}


def _ltx2_scheduler(config: dict[str, Any], thw: Grid, number: int) -> Any:
    from lightx2v.models.schedulers.ltx2.scheduler import LTX2Scheduler

    scheduler = LTX2Scheduler(config)
    scheduler.prepare(seed=number, video_latent_shape=(8, *thw), audio_latent_shape=(2, 9, 3))
    return scheduler


def _call_ltx2(model: Any, thw: Grid, number: int, step: int, branch: int) -> torch.Tensor:
    """Of passes with and without the text, with a block whose attention is left out, and without audio for video."""
    texts = {f"{stream}_context_{kind}": random(branch, 1, TEXT, SHARE) for stream in "va" for kind in "pn"}
    perturbed = {2: {"skip_video_self_blocks": {1}}, 3: {"skip_a2v": True, "skip_v2a": True}}.get(branch)
    video, audio = model._infer_cond_uncond({"text_encoder_output": texts}, branch != 1, perturbed)
    return torch.cat([video.flatten(), audio.flatten()])


# ---- Images ----
def _image_sizes(heads: int) -> dict[str, Any]:
    return {"num_attention_heads": heads, "attention_head_dim": HEAD, "joint_attention_dim": SHARE, "in_channels": 8}


EDITED = (1, 4, 4)  # an image that is edited, which follows the one that is made


def _image_call(model: Any, thw: Grid, number: int, step: int, branch: int) -> torch.Tensor:
    model.scheduler.timesteps_proj = _time(step)
    edited = math.prod(EDITED) if model.config["task"] == "i2i" else 0
    latents = random(1000 * number + 10 * step, 1, math.prod(thw) + edited, 8)
    output: torch.Tensor = model._infer_cond_uncond(latents, random(branch, 1, TEXT, SHARE), branch == 0)
    # of a padded sequence the runner takes what is the image
    return output[:, : math.prod(thw)]


def _qwen_config(heads: int) -> dict[str, Any]:
    return _image_sizes(heads) | {"num_layers": LAYERS, "model_cls": "qwen_image", "task": "t2i"}


def _qwen_edit_config(heads: int) -> dict[str, Any]:
    return _qwen_config(heads) | {"task": "i2i"}


def _qwen_shapes(heads: int) -> Shapes:
    sizes = {"num_layers": LAYERS, "out_channels": 2, "axes_dims_rope": (8, 8, 8)}
    return _of_diffusers("QwenImageTransformer2DModel", **_image_sizes(heads), **sizes)


def _qwen_scheduler(config: dict[str, Any], thw: Grid, number: int) -> Any:
    from lightx2v.models.schedulers.qwen_image.scheduler import QwenEmbedRope

    images = [[thw, EDITED] if config["task"] == "i2i" else [thw]]
    image, text = QwenEmbedRope(theta=10000, axes_dim=[8, 8, 8], scale_rope=True)(images, TEXT, device="cpu")
    rotary = sharded(config, image), text
    shapes = SimpleNamespace(image_shapes=images)
    return _namespace(
        config,
        input_info=shapes,
        rope_request_id=number,
        modulate_index=None,
        image_rotary_emb=rotary,
        negative_image_rotary_emb=rotary,
    )


def _flux2_config(heads: int) -> dict[str, Any]:
    sizes = {"num_layers": 1, "num_single_layers": LAYERS - 1, "axes_dims_rope": (6, 6, 6, 6)}
    return _image_sizes(heads) | sizes | {"model_cls": "flux2_klein", "task": "t2i"}


def _flux2_shapes(heads: int) -> Shapes:
    sizes = {"num_layers": 1, "num_single_layers": LAYERS - 1, "axes_dims_rope": (6, 6, 6, 6), "mlp_ratio": 2.0}
    sizes |= {"timestep_guidance_channels": 256, "guidance_embeds": False}
    return _of_diffusers("Flux2Transformer2DModel", **_image_sizes(heads), **sizes)


def _flux2_scheduler(config: dict[str, Any], thw: Grid, number: int) -> Any:
    image = torch.cartesian_prod(*map(torch.arange, (*thw, 1)))[None]
    return _namespace(
        config, latent_image_ids=image, txt_ids=torch.cartesian_prod(*map(torch.arange, (1, 1, 1, TEXT)))
    )


def _longcat_config(heads: int) -> dict[str, Any]:
    return _flux2_config(heads) | {"model_cls": "longcat_image"}


def _longcat_shapes(heads: int) -> Shapes:
    sizes = {"num_layers": 1, "num_single_layers": LAYERS - 1, "axes_dims_rope": [8, 8, 8], "patch_size": 1}
    return _of_diffusers("LongCatImageTransformer2DModel", **_image_sizes(heads), **sizes, pooled_projection_dim=SHARE)


def _longcat_scheduler(config: dict[str, Any], thw: Grid, number: int) -> Any:
    angles = random(number, TEXT + math.prod(thw), HEAD // 2).repeat_interleave(2, dim=1)
    parts = [(each[:TEXT], sharded(config, each[TEXT:])) for each in (angles.cos(), angles.sin())]
    rotary = tuple(map(torch.cat, parts))
    shape = SimpleNamespace(target_shape=(1, 2, 2 * thw[1], 2 * thw[2]))
    return _namespace(config, input_info=shape, image_rotary_emb=rotary, negative_image_rotary_emb=rotary)


Z_TEXT = 32  # its text and image are each filled up to a multiple of 32, which is attended to


def _z_config(heads: int) -> dict[str, Any]:
    sizes = {"n_heads": heads, "n_layers": LAYERS, "n_refiner_layers": 1, "axes_dims": [8, 8, 8], "patch_size": 2}
    return sizes | {"model_cls": "z_image", "task": "t2i"}


def _z_shapes(heads: int) -> Shapes:
    sizes = {"dim": heads * HEAD, "n_heads": heads, "n_kv_heads": heads, "n_layers": LAYERS, "n_refiner_layers": 1}
    sizes |= {"in_channels": 4, "cap_feat_dim": SHARE, "axes_dims": [8, 8, 8], "axes_lens": [256, 64, 64]}
    return _of_diffusers("ZImageTransformer2DModel", **sizes)


def _z_scheduler(config: dict[str, Any], thw: Grid, number: int) -> Any:
    from lightx2v.models.schedulers.z_image.scheduler import RopeEmbedder, ZImageScheduler

    embedder = RopeEmbedder(theta=256.0, axes_dims=[8, 8, 8], axes_lens=[256, 64, 64])
    return _namespace(
        config,
        input_info=SimpleNamespace(target_shape=(1, 4, 2 * thw[1], 2 * thw[2])),
        rope_request_id=number,
        create_coordinate_grid=ZImageScheduler.create_coordinate_grid,
        generate_freqs_cis_from_position_ids=lambda positions, device=None: embedder(positions),
    )


def _call_z(model: Any, thw: Grid, number: int, step: int, branch: int) -> torch.Tensor:
    model.scheduler.timesteps_proj = _time(step)
    latents = random(1000 * number + 10 * step, 1, 4, 2 * thw[1], 2 * thw[2])
    output: torch.Tensor = model._infer_cond_uncond(latents, random(branch, 1, TEXT, SHARE), branch == 0)
    return output


def _tokens_of_edit(thw: Grid) -> tuple[torch.Tensor, int]:
    made, edited = TEXT + torch.arange(math.prod(thw)), math.prod(EDITED)
    positions = [torch.arange(TEXT), TEXT + len(made) + torch.arange(edited), made]
    return torch.cat(positions), TEXT + edited


def _tokens_of_z(thw: Grid) -> tuple[torch.Tensor, int]:
    """The text is after the image and what fills it up, which counts as text that follows."""
    image = math.prod(thw)
    slots = image + -image % 32
    positions = [slots + torch.arange(Z_TEXT), torch.arange(image, slots), torch.arange(image)]
    return torch.cat(positions), Z_TEXT + slots - image


def _namespace(config: dict[str, Any], **values: Any) -> SimpleNamespace:
    return SimpleNamespace(config=config, infer_steps=STEPS, step_index=0, infer_condition=True, **values)


def _calculate_of_flux2(weights: Any) -> list[Any]:
    return [block.calculate for block in (*weights.double_blocks, *weights.single_blocks)]


MODELS = {
    "minimax_h3": Model(
        "minimax_h3.model:MiniMaxH3Model",
        _h3_config,
        _h3_shapes,
        _h3_scheduler,
        _call_h3,
        lambda weights: [block.attn.calculate for block in weights.blocks],
        _text_first(TEXT + H3_AUDIO),
    ),
    "hunyuan_video_15": Model(
        "hunyuan_video.model:HunyuanVideo15Model",
        _hunyuan_config,
        _hunyuan_shapes,
        _hunyuan_scheduler,
        _call_hunyuan,
        lambda weights: [block.self_attention for block in weights.double_blocks],
        lambda thw: _text_last(thw, HUNYUAN_TEXT),
    ),
    "qwen_image": Model(
        "qwen_image.model:QwenImageTransformerModel",
        _qwen_config,
        _qwen_shapes,
        _qwen_scheduler,
        _image_call,
        lambda weights: [block.compute_phases[2].calculate for block in weights.blocks],
        _text_first(TEXT),
    ),
    "qwen_image_edit": Model(
        "qwen_image.model:QwenImageTransformerModel",
        _qwen_edit_config,
        _qwen_shapes,
        _qwen_scheduler,
        _image_call,
        lambda weights: [block.compute_phases[2].calculate for block in weights.blocks],
        _tokens_of_edit,
    ),
    "flux2": Model(
        "flux2.model:Flux2KleinTransformerModel",
        _flux2_config,
        _flux2_shapes,
        _flux2_scheduler,
        _image_call,
        _calculate_of_flux2,
        _text_first(TEXT),
    ),
    "longcat_image": Model(
        "longcat_image.model:LongCatImageTransformerModel",
        _longcat_config,
        _longcat_shapes,
        _longcat_scheduler,
        _image_call,
        _calculate_of_flux2,
        _text_first(TEXT),
    ),
    "ltx2": Model(
        "ltx2.model:LTX2Model",
        _ltx2_config,
        _ltx2_shapes,
        _ltx2_scheduler,
        _call_ltx2,
        lambda weights: [block.compute_phases[0].attn_func for block in weights.blocks],
        _text_first(0),
    ),
    "z_image": Model(
        "z_image.model:ZImageTransformerModel",
        _z_config,
        _z_shapes,
        _z_scheduler,
        _call_z,
        lambda weights: [block.compute_phases[1].calculate for block in weights.blocks],
        _tokens_of_z,
    ),
}

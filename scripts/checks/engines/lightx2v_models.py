"""LightX2V's models besides Wan, tiny: how each is made and called, and where its tokens are in one process.

Real: weights as they are loaded, what is before, in and after the blocks, and sharding; the schedulers of MiniMax-H3
and LTX-2. For the others a namespace stands with what is read of them.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
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


class Model:
    """One class of LightX2V, tiny.

    Each has `config` and `shapes` (settings, and those of its checkpoint's tensors, with so many heads), `scheduler`
    (that of one denoising), `call` (one CFG pass of a step) and `attentions` (those of the layers, of its weights).
    """

    cls: str  # as "package.module:Class" below LightX2V's networks
    text = TEXT  # tokens before the video in the sequence of one process

    def tokens(self, thw: Grid) -> tuple[torch.Tensor, int]:
        """int64, positions in the sequence of one process of text, then video; and how many are text."""
        return torch.arange(self.text + math.prod(thw)), self.text

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


def of_diffusers(cls: str, **sizes: Any) -> Shapes:
    """Shapes of a checkpoint as diffusers' class of that name has it."""
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


def namespace(config: dict[str, Any], **values: Any) -> SimpleNamespace:
    """Returns what is read of a scheduler."""
    return SimpleNamespace(config=config, infer_steps=STEPS, step_index=0, infer_condition=True, **values)


H3_FRAMES, H3_AUDIO = (
    124,
    2 * 207,
)  # of its shortest video, of 37 latent frames, and tokens of its sound's two channels


class MiniMaxH3(Model):
    cls = "minimax_h3.model:MiniMaxH3Model"
    text = TEXT + H3_AUDIO

    def config(self, heads: int) -> dict[str, Any]:
        sizes = {"num_attention_heads": heads, "attention_head_dim": HEAD, "hidden_size": heads * HEAD}
        sizes |= {"ffn_hidden_size": 48, "num_layers": LAYERS, "num_refiner_layers": 1, "freq_dim": 32}
        return sizes | {"rope_freq_dim": 4, "model_cls": "minimax_h3", "task": "t2av", "infer_steps": STEPS + 1}

    def shapes(self, heads: int) -> Shapes:
        width = heads * HEAD
        sizes = {"num_attention_heads": heads, "attention_head_dim": HEAD, "hidden_size": width, "text_dim": SHARE}
        sizes |= {"ffn_dim": 48, "num_layers": LAYERS, "num_refiner_layers": 1, "freq_dim": 32, "rope_freq_dim": 4}
        return of_diffusers("MiniMaxH3Transformer3DModel", **sizes, time_embed_hidden_dim=width, time_embed_dim=width)

    def scheduler(self, config: dict[str, Any], thw: Grid, number: int) -> Any:
        from lightx2v.models.schedulers.minimax_h3.scheduler import MiniMaxH3Scheduler

        scheduler = MiniMaxH3Scheduler(config)
        scheduler.prepare(number, H3_FRAMES, 32 * thw[1], 32 * thw[2], torch.ones(TEXT, dtype=torch.long))
        return scheduler

    def call(self, model: Any, thw: Grid, number: int, step: int, branch: int) -> torch.Tensor:
        model.scheduler.step_pre(step)
        output = model._infer_cond_uncond({"text_encoder_output": {"prompt_embeds": random(number, TEXT, SHARE)}})
        return torch.cat([output.video.flatten(), output.audio.flatten()])

    def attentions(self, weights: Any) -> list[Any]:
        return [block.attn.calculate for block in weights.blocks]


class HunyuanVideo15(Model):
    cls = "hunyuan_video.model:HunyuanVideo15Model"
    text = TEXT - 2 + 3 + 4  # valid tokens of two texts and of an image, after the video

    def config(self, heads: int) -> dict[str, Any]:
        sizes = {"heads_num": heads, "hidden_size": heads * HEAD, "mm_double_blocks_depth": LAYERS, "out_channels": 4}
        sizes |= {"patch_size": (1, 1, 1), "rope_dim_list": [8, 8, 8], "rope_theta": 256, "is_sr_running": False}
        return sizes | {"model_cls": "hunyuan_video_1.5", "task": "t2v"}

    def shapes(self, heads: int) -> Shapes:
        width = heads * HEAD
        linear = {"txt_in.c_embedder.linear_1": (width, SHARE), "txt_in.c_embedder.linear_2": (width, width)}
        linear |= {"final_layer.adaLN_modulation.1": (2 * width, width), "final_layer.linear": (4, width)}
        linear |= {"txt_in.input_embedder": (width, SHARE)}
        for name in ("time_in.mlp", "txt_in.t_embedder.mlp"):
            linear |= {f"{name}.0": (width, 256), f"{name}.2": (width, width)}
        norms = {"cond_type_embedding.weight": (3, width)}
        for block in (f"txt_in.individual_token_refiner.blocks.{number}" for number in range(2)):
            linear |= {f"{block}.self_attn_qkv": (3 * width, width), f"{block}.self_attn_proj": (width, width)}
            linear |= {f"{block}.mlp.fc1": (48, width), f"{block}.mlp.fc2": (width, 48)}
            linear |= {f"{block}.adaLN_modulation.1": (2 * width, width)}
            norms |= {f"{block}.norm{norm}.{kind}": (width,) for norm in (1, 2) for kind in ("weight", "bias")}
        for block in (f"double_blocks.{layer}.{stream}" for layer in range(LAYERS) for stream in ("img", "txt")):
            linear |= {f"{block}_attn_{name}": (width, width) for name in ("q", "k", "v", "proj")}
            linear |= {f"{block}_mlp.fc1": (48, width), f"{block}_mlp.fc2": (width, 48)}
            linear |= {f"{block}_mod.linear": (6 * width, width)}
            norms |= {f"{block}_attn_{name}_norm.weight": (HEAD,) for name in ("q", "k")}
        weights = {f"{name}.weight": shape for name, shape in linear.items()} | {
            "img_in.proj.weight": (width, 9, 1, 1, 1)
        }
        biases = {name.replace(".weight", ".bias"): shape[:1] for name, shape in weights.items()}
        return weights | biases | norms

    def scheduler(self, config: dict[str, Any], thw: Grid, number: int) -> Any:
        from lightx2v.models.networks.hunyuan_video.infer import pre_infer

        pre_infer.torch = TorchInFloat32()
        latents, timesteps = random(1000 * number, 1, 4, *thw), 900.0 - 300 * torch.arange(STEPS)
        conditions = {"cond_latents_concat": torch.zeros(1, 4, *thw), "mask_concat": torch.zeros(1, 1, *thw)}
        return namespace(config, latents=latents, timesteps=timesteps, **conditions)

    def call(self, model: Any, thw: Grid, number: int, step: int, branch: int) -> torch.Tensor:
        width = model.config["hidden_size"]
        text = [random(branch, 1, TEXT, SHARE), torch.arange(TEXT)[None] < TEXT - 2]
        texts = {"context": text, "context_null": text, "byt5_features": random(100 + branch, 1, 5, width)}
        texts["byt5_masks"] = torch.arange(5)[None] < 3
        image = {"siglip_output": random(200, 1, 4, width), "siglip_mask": torch.ones(1, 4)}
        inputs = {"text_encoder_output": texts, "image_encoder_output": image}
        return model._infer_cond_uncond(inputs, branch == 0)

    def attentions(self, weights: Any) -> list[Any]:
        return [block.self_attention for block in weights.double_blocks]

    def tokens(self, thw: Grid) -> tuple[torch.Tensor, int]:
        video = math.prod(thw)
        return torch.cat([video + torch.arange(self.text), torch.arange(video)]), self.text


LTX2_AUDIO_HEAD = 12
LTX2_NAMES = {
    "proj_in.": "patchify_proj.",
    "time_embed.": "adaln_single.",
    "av_cross_attn_video_scale_shift.": "av_ca_video_scale_shift_adaln_single.",
    "av_cross_attn_audio_scale_shift.": "av_ca_audio_scale_shift_adaln_single.",
    "av_cross_attn_video_a2v_gate.": "av_ca_a2v_gate_adaln_single.",
    "av_cross_attn_audio_v2a_gate.": "av_ca_v2a_gate_adaln_single.",
    "norm_q.": "q_norm.",
    "norm_k.": "k_norm.",
    "video_a2v_cross_attn_scale_shift_table": "scale_shift_table_a2v_ca_video",
    "audio_a2v_cross_attn_scale_shift_table": "scale_shift_table_a2v_ca_audio",
}
"""Parts of names by diffusers, and as its authors have them, which LightX2V reads."""


class LTX2(Model):
    cls = "ltx2.model:LTX2Model"
    text = 0

    def config(self, heads: int) -> dict[str, Any]:
        sizes = {"num_attention_heads": heads, "attention_head_dim": HEAD, "num_layers": LAYERS, "fps": 24}
        sizes |= {"audio_num_attention_heads": heads, "audio_attention_head_dim": LTX2_AUDIO_HEAD}
        sizes |= {"audio_cross_attention_dim": heads * LTX2_AUDIO_HEAD, "audio_pos_embed_max_pos": 20}
        sizes |= {"timestep_scale_multiplier": 1000, "av_ca_timestep_scale_multiplier": 1, "sample_guide_scale": 1.0}
        sizes |= {"sample_shift": [2.05, 0.95], "distilled_sigma_values": [1.0, 0.7, 0.4, 0.0]}
        return sizes | {"rope_type": "torch_real_rope", "model_cls": "ltx2", "task": "t2av"}

    def shapes(self, heads: int) -> Shapes:
        sizes = {"in_channels": 8, "out_channels": 8, "audio_in_channels": 6, "audio_out_channels": 6}
        sizes |= {"num_attention_heads": heads, "attention_head_dim": HEAD, "cross_attention_dim": heads * HEAD}
        sizes |= {"audio_num_attention_heads": heads, "audio_attention_head_dim": LTX2_AUDIO_HEAD}
        sizes |= {"audio_cross_attention_dim": heads * LTX2_AUDIO_HEAD, "num_layers": LAYERS}
        shapes = {}
        for name, shape in of_diffusers("LTX2VideoTransformer3DModel", **sizes, caption_channels=SHARE).items():
            for part, own in LTX2_NAMES.items():
                name = name.replace(part, own)
            shapes[f"model.diffusion_model.{name}"] = shape
        return shapes

    def scheduler(self, config: dict[str, Any], thw: Grid, number: int) -> Any:
        from lightx2v.models.schedulers.ltx2.scheduler import LTX2Scheduler

        scheduler = LTX2Scheduler(config)
        scheduler.prepare(seed=number, video_latent_shape=(8, *thw), audio_latent_shape=(2, 9, 3))
        return scheduler

    def call(self, model: Any, thw: Grid, number: int, step: int, branch: int) -> torch.Tensor:
        """Calls passes with and without text, one with a block whose attention is left out, one without audio."""
        texts = {f"{stream}_context_{kind}": random(branch, 1, TEXT, SHARE) for stream in "va" for kind in "pn"}
        perturbed = {2: {"skip_video_self_blocks": {1}}, 3: {"skip_a2v": True, "skip_v2a": True}}.get(branch)
        video, audio = model._infer_cond_uncond({"text_encoder_output": texts}, branch != 1, perturbed)
        return torch.cat([video.flatten(), audio.flatten()])

    def attentions(self, weights: Any) -> list[Any]:
        return [block.compute_phases[0].attn_func for block in weights.blocks]


class Image(Model):
    """Parts that models of images share."""

    edited: Grid = (0, 0, 0)  # an image that is edited, which follows the one that is made

    def sizes(self, heads: int) -> dict[str, Any]:
        sizes = {"num_attention_heads": heads, "attention_head_dim": HEAD}
        return sizes | {"joint_attention_dim": SHARE, "in_channels": 8}

    def call(self, model: Any, thw: Grid, number: int, step: int, branch: int) -> torch.Tensor:
        model.scheduler.timesteps_proj = random(500 + step, 1, 256)
        latents = random(1000 * number + 10 * step, 1, math.prod(thw) + math.prod(self.edited), 8)
        output: torch.Tensor = model._infer_cond_uncond(latents, random(branch, 1, TEXT, SHARE), branch == 0)
        return output[:, : math.prod(thw)]  # of a padded sequence the runner takes what is the image


class QwenImage(Image):
    cls = "qwen_image.model:QwenImageTransformerModel"
    task = "t2i"

    def config(self, heads: int) -> dict[str, Any]:
        return self.sizes(heads) | {"num_layers": LAYERS, "model_cls": "qwen_image", "task": self.task}

    def shapes(self, heads: int) -> Shapes:
        sizes = {"num_layers": LAYERS, "out_channels": 2, "axes_dims_rope": (8, 8, 8)}
        return of_diffusers("QwenImageTransformer2DModel", **self.sizes(heads), **sizes)

    def scheduler(self, config: dict[str, Any], thw: Grid, number: int) -> Any:
        from lightx2v.models.schedulers.qwen_image.scheduler import QwenEmbedRope

        images = [[thw, self.edited] if self.task == "i2i" else [thw]]
        image, text = QwenEmbedRope(theta=10000, axes_dim=[8, 8, 8], scale_rope=True)(images, TEXT, device="cpu")
        rotary = sharded(config, image), text
        both = {"image_rotary_emb": rotary, "negative_image_rotary_emb": rotary}
        shapes = SimpleNamespace(image_shapes=images)
        return namespace(config, input_info=shapes, rope_request_id=number, modulate_index=None, **both)

    def attentions(self, weights: Any) -> list[Any]:
        return [block.compute_phases[2].calculate for block in weights.blocks]


class QwenImageEdit(QwenImage):
    task, edited = "i2i", (1, 4, 4)

    def tokens(self, thw: Grid) -> tuple[torch.Tensor, int]:
        made, edited = TEXT + torch.arange(math.prod(thw)), math.prod(self.edited)
        positions = [torch.arange(TEXT), TEXT + len(made) + torch.arange(edited), made]
        return torch.cat(positions), TEXT + edited


class Flux2(Image):
    cls = "flux2.model:Flux2KleinTransformerModel"
    kind = "flux2_klein"

    def config(self, heads: int) -> dict[str, Any]:
        sizes = {"num_layers": 1, "num_single_layers": LAYERS - 1, "axes_dims_rope": (6, 6, 6, 6)}
        return self.sizes(heads) | sizes | {"model_cls": self.kind, "task": "t2i"}

    def shapes(self, heads: int) -> Shapes:
        sizes = {"num_layers": 1, "num_single_layers": LAYERS - 1, "axes_dims_rope": (6, 6, 6, 6), "mlp_ratio": 2.0}
        sizes |= {"timestep_guidance_channels": 256, "guidance_embeds": False}
        return of_diffusers("Flux2Transformer2DModel", **self.sizes(heads), **sizes)

    def scheduler(self, config: dict[str, Any], thw: Grid, number: int) -> Any:
        image = torch.cartesian_prod(*map(torch.arange, (*thw, 1)))[None]
        text = torch.cartesian_prod(*map(torch.arange, (1, 1, 1, TEXT)))
        return namespace(config, latent_image_ids=image, txt_ids=text)

    def attentions(self, weights: Any) -> list[Any]:
        return [block.calculate for block in (*weights.double_blocks, *weights.single_blocks)]


class LongCatImage(Flux2):
    cls = "longcat_image.model:LongCatImageTransformerModel"
    kind = "longcat_image"

    def shapes(self, heads: int) -> Shapes:
        sizes = {"num_layers": 1, "num_single_layers": LAYERS - 1, "axes_dims_rope": [8, 8, 8], "patch_size": 1}
        sizes |= self.sizes(heads) | {"pooled_projection_dim": SHARE}
        return of_diffusers("LongCatImageTransformer2DModel", **sizes)

    def scheduler(self, config: dict[str, Any], thw: Grid, number: int) -> Any:
        angles = random(number, TEXT + math.prod(thw), HEAD // 2).repeat_interleave(2, dim=1)
        parts = [(each[:TEXT], sharded(config, each[TEXT:])) for each in (angles.cos(), angles.sin())]
        rotary = tuple(map(torch.cat, parts))
        shape = SimpleNamespace(target_shape=(1, 2, 2 * thw[1], 2 * thw[2]))
        return namespace(config, input_info=shape, image_rotary_emb=rotary, negative_image_rotary_emb=rotary)


class ZImage(Model):
    """Z-Image, whose text and image are each filled up to a multiple of 32, which is attended to."""

    cls = "z_image.model:ZImageTransformerModel"
    text = 32

    def config(self, heads: int) -> dict[str, Any]:
        sizes = {"n_heads": heads, "n_layers": LAYERS, "n_refiner_layers": 1, "axes_dims": [8, 8, 8], "patch_size": 2}
        return sizes | {"model_cls": "z_image", "task": "t2i"}

    def shapes(self, heads: int) -> Shapes:
        sizes = {"dim": heads * HEAD, "n_heads": heads, "n_kv_heads": heads, "n_layers": LAYERS}
        sizes |= {"n_refiner_layers": 1, "in_channels": 4, "cap_feat_dim": SHARE}
        return of_diffusers("ZImageTransformer2DModel", **sizes, axes_dims=[8, 8, 8], axes_lens=[256, 64, 64])

    def scheduler(self, config: dict[str, Any], thw: Grid, number: int) -> Any:
        from lightx2v.models.schedulers.z_image.scheduler import RopeEmbedder, ZImageScheduler

        embedder = RopeEmbedder(theta=256.0, axes_dims=[8, 8, 8], axes_lens=[256, 64, 64])
        return namespace(
            config,
            input_info=SimpleNamespace(target_shape=(1, 4, 2 * thw[1], 2 * thw[2])),
            rope_request_id=number,
            create_coordinate_grid=ZImageScheduler.create_coordinate_grid,
            generate_freqs_cis_from_position_ids=lambda positions, device=None: embedder(positions),
        )

    def call(self, model: Any, thw: Grid, number: int, step: int, branch: int) -> torch.Tensor:
        model.scheduler.timesteps_proj = random(500 + step, 1, 256)
        latents = random(1000 * number + 10 * step, 1, 4, 2 * thw[1], 2 * thw[2])
        return model._infer_cond_uncond(latents, random(branch, 1, TEXT, SHARE), branch == 0)

    def attentions(self, weights: Any) -> list[Any]:
        return [block.compute_phases[1].calculate for block in weights.blocks]

    def tokens(self, thw: Grid) -> tuple[torch.Tensor, int]:
        """The text is after the image and what fills it up, which counts as text that follows."""
        image = math.prod(thw)
        slots = image + -image % 32
        positions = [slots + torch.arange(self.text), torch.arange(image, slots), torch.arange(image)]
        return torch.cat(positions), self.text + slots - image


MODELS = {
    "minimax_h3": MiniMaxH3(),
    "hunyuan_video_15": HunyuanVideo15(),
    "qwen_image": QwenImage(),
    "qwen_image_edit": QwenImageEdit(),
    "flux2": Flux2(),
    "longcat_image": LongCatImage(),
    "ltx2": LTX2(),
    "z_image": ZImage(),
}

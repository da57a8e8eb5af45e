"""LightX2V's own Wan, tiny and random, on CPU ranks, against one process of it: a line of JSON a case.

torchrun --nproc_per_node N -m scripts.checks.engines.lightx2v_cases ULYSSES RING CASES FILE

Real: its configuration, loading of weights from a file, model, scheduler, guidance, choice of Wan2.2's transformer,
and sharding. Replaced: its device (it has none for CPUs); pinned memory, which needs a GPU; what BF16 stands for, by
fp32, as it has no word for that and errors of 1e-6 would be lost; packages for sound and video files and kernels for
GPUs, which are imported only.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers.utils
import yaml
from safetensors.torch import save_file

from scripts.checks.engines.reference import attend_under, fill, inputs_of, stand_in_for
from scripts.checks.engines.runs import LAYERS, LEAVE_OUT, STEPS, Case, cases_of, report

torch.set_num_threads(1)
transformers.utils.is_torchvision_available()  # remembers that there is none
stand_in_for("torchvision", "torchvision.transforms", "torchvision.transforms.functional", "torchvision.io")
stand_in_for("torchvision.utils", "torchvision.transforms.v2", "torchaudio", "torchaudio.functional")
stand_in_for("torchaudio.transforms", "decord", "cv2", "flash_attn", "flash_attn.flash_attn_interface")

_empty = torch.empty


def without_pinning(*sizes: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
    return _empty(*sizes, **options)


torch.empty = without_pinning

import dbsp_lightx2v.plugin  # noqa: E402

if os.environ.get(LEAVE_OUT):
    dbsp_lightx2v.plugin.register = lambda: None

import lightx2v_platform.set_ai_device  # noqa: E402, F401  loads plug-ins, as LightX2V's commands do
from lightx2v.utils import envs  # noqa: E402

envs.DTYPE_MAP["BF16"] = torch.float32

from lightx2v.models.networks.wan.model import WanModel  # noqa: E402
from lightx2v.models.runners.wan.wan_runner import MultiModelStruct  # noqa: E402
from lightx2v.models.schedulers.wan.scheduler import WanScheduler  # noqa: E402
from lightx2v.utils.set_config import set_parallel_config  # noqa: E402
from lightx2v_platform.registry_factory import PLATFORM_DEVICE_REGISTER  # noqa: E402

HEAD = 24


def settings(case: Case, ranks: int, mask: str | None) -> dict[str, Any]:
    config: dict[str, Any] = {"task": "t2v", "model_cls": "wan2.2_moe" if case.pair else "wan2.1"}
    config |= {"num_layers": LAYERS, "num_heads": case.heads, "dim": case.heads * HEAD, "ffn_dim": 48, "freq_dim": 32}
    config |= {"in_dim": 4, "out_dim": 4, "patch_size": (1, 2, 2), "vae_stride": (4, 8, 8), "text_len": 7}
    config |= {"infer_steps": STEPS, "target_video_length": 9, "sample_shift": 5.0, "feature_caching": "NoCaching"}
    config |= {"sample_guide_scale": [2.0, 2.0] if case.pair else 2.0, "enable_cfg": case.passes > 1}
    config |= {"cfg_parallel": False, "seq_parallel": False, "parallel": False, "cpu_offload": False}
    config |= dict.fromkeys(("self_attn_1_type", "cross_attn_1_type", "cross_attn_2_type"), "torch_sdpa")
    config |= {"rms_norm_type": "torch", "rope_type": "torch_complex_rope", "modulate_type": "torch"}
    if ranks > 1:
        stock = "ring" if case.strategy and case.strategy.startswith("U1R") else "ulysses"
        config["parallel"] = {"seq_p_size": ranks, "seq_p_attn_type": stock if mask is None else "dbsp"}
        if mask is not None:
            config["parallel"]["dbsp"] = {"mask": mask_of(mask), "strategy": case.strategy}
        set_parallel_config(config)
    elif mask is not None:
        config |= {"self_attn_1_type": "dbsp", "dbsp": mask}
    return config


def mask_of(mask: str) -> dict[str, Any]:
    source, _, options = mask.partition(":")
    return {"source": source} | {
        name: yaml.safe_load(value) for name, value in (one.split("=") for one in options.split(","))
    }


def weights(case: Case, seed: int) -> dict[str, torch.Tensor]:
    dim = case.heads * HEAD
    shapes: dict[str, tuple[int, ...]] = {"patch_embedding": (dim, 4, 1, 2, 2), "text_embedding.0": (dim, 16)}
    shapes |= {"text_embedding.2": (dim, dim), "time_embedding.0": (dim, 32), "time_embedding.2": (dim, dim)}
    shapes |= {"time_projection.1": (6 * dim, dim), "head.head": (16, dim)}
    for layer in range(LAYERS):
        for name in ("q", "k", "v", "o"):
            shapes |= {f"blocks.{layer}.{kind}_attn.{name}": (dim, dim) for kind in ("self", "cross")}
        shapes |= {f"blocks.{layer}.ffn.0": (48, dim), f"blocks.{layer}.ffn.2": (dim, 48)}
    tensors = {f"{name}.weight": shape for name, shape in shapes.items()}
    tensors |= {f"{name}.bias": (shape[0],) for name, shape in shapes.items()}
    tensors["head.modulation"] = (1, 2, dim)
    for layer in range(LAYERS):
        block = f"blocks.{layer}"
        tensors |= {f"{block}.modulation": (1, 6, dim), f"{block}.norm3.weight": (dim,), f"{block}.norm3.bias": (dim,)}
        for kind in ("self", "cross"):
            tensors |= {f"{block}.{kind}_attn.norm_{one}.weight": (dim,) for one in ("q", "k")}
    generator = torch.Generator().manual_seed(seed)
    return {name: fill(name, shape, generator) for name, shape in sorted(tensors.items())}


def tiny(case: Case, config: dict[str, Any], folder: Path) -> Any:
    models = []
    for seed in (0, 1) if case.pair else (0,):
        file = folder / f"{os.environ['RANK']}-{seed}.safetensors"
        save_file(weights(case, seed), file)
        model = WanModel(str(file), config | {"dit_original_ckpt": str(file)}, torch.device("cpu"))
        for part in (model.pre_weight, model.transformer_weights):
            part.to_cuda()  # from what LightX2V takes for offloaded weights to its device
        models.append(model)
    return MultiModelStruct(models, config) if case.pair else models[0]


def denoise(case: Case, config: dict[str, Any], mask: str | None = None) -> list[torch.Tensor]:
    """Predictions of all steps and sizes; under a mask by torch's own attention, where one is given."""
    outputs = []
    with tempfile.TemporaryDirectory() as folder:
        model = tiny(case, config, Path(folder))
        scheduler = WanScheduler(config)
        model.set_scheduler(scheduler)
        for number, thw in enumerate(case.sizes):
            if mask is not None:
                mask_attention(model.model if case.pair else [model], mask, thw)
            latents, text = inputs_of(thw, number, 0, 0)
            inputs = {"context": text, "context_null": inputs_of(thw, number, 0, 1)[1]}
            scheduler.prepare(seed=number, latent_shape=list(latents.shape[1:]))
            for step in range(STEPS):
                scheduler.step_pre(step_index=step)
                model.infer({"text_encoder_output": inputs, "image_encoder_output": None})
                outputs.append(scheduler.noise_pred.clone())
                scheduler.step_post()
            scheduler.clear()
    return outputs


def mask_attention(models: list[Any], mask: str, thw: tuple[int, int, int]) -> None:
    for model in models:
        for layer, block in enumerate(model.transformer_weights.blocks):

            def attend(q: Any, k: Any, v: Any, layer: int = layer, **_: Any) -> torch.Tensor:
                out = attend_under(mask, layer, LAYERS, thw, q[None], k[None], v[None])
                return out.flatten(2)[0]

            block.compute_phases[0].self_attn_1.apply = attend


def error_of(case: Case, ranks: int) -> dict[str, float]:
    alone = settings(case, 1, None)
    dense = denoise(case, alone)
    expected = dense if case.mask is None else denoise(case, alone, case.mask)
    found = denoise(case, settings(case, ranks, case.wrong or case.mask))
    return {"error": worst(found, expected), "dense": worst(dense, expected)}


def worst(some: list[torch.Tensor], others: list[torch.Tensor]) -> float:
    return max(float((one - other).abs().max()) for one, other in zip(some, others, strict=True))


def main() -> None:
    PLATFORM_DEVICE_REGISTER["cpu"].init_parallel_env()
    ulysses, ring = int(sys.argv[1]), int(sys.argv[2])
    for case in cases_of(sys.argv[3]):
        case = case if case.strategy else Case(**vars(case) | {"strategy": f"U{ulysses}R{ring}"})
        try:
            report(error_of(case, ulysses * ring))
        except Exception as error:  # the engine's own refusal, on every rank before anything is sent
            report({"refused": f"{type(error).__name__}: {error}"})
    torch.distributed.destroy_process_group()


main()

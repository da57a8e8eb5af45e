"""LightX2V's own Wan, tiny and random, on CPU ranks, against one process of it: a line of JSON a case.

torchrun --nproc_per_node N -m scripts.checks.engines.lightx2v_cases ULYSSES RING CASES FILE

Real: its configuration, loading of weights from a file, model, scheduler, guidance, choice of Wan2.2's transformer,
and sharding. Replaced: its device (it has none for CPUs), and what `lightx2v_stubs` lists.
"""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import save_file

import dbsp_engines.lightx2v
from scripts.checks.engines.lightx2v_checkpoint import weights
from scripts.checks.engines.lightx2v_models import MODELS
from scripts.checks.engines.lightx2v_stubs import in_float32, put_in_place
from scripts.checks.engines.reference import attend_under, inputs_of
from scripts.checks.engines.runs import HEAD, LAYERS, LEAVE_OUT, STEPS, Case, cases_of, report
from tests.support.outcomes import apart

torch.set_num_threads(1)
put_in_place()
if os.environ.get(LEAVE_OUT):
    dbsp_engines.lightx2v.register = lambda: None

import lightx2v_platform.set_ai_device  # noqa: E402, F401  loads plug-ins, as LightX2V's commands do

in_float32()
from lightx2v.models.networks.wan.distill_model import WanDistillModel  # noqa: E402
from lightx2v.models.networks.wan.model import WanModel  # noqa: E402
from lightx2v.models.runners.wan.wan_distill_runner import MultiDistillModelStruct  # noqa: E402
from lightx2v.models.runners.wan.wan_runner import MultiModelStruct  # noqa: E402
from lightx2v.models.schedulers.wan.scheduler import WanScheduler  # noqa: E402
from lightx2v.models.schedulers.wan.step_distill.scheduler import (  # noqa: E402
    Wan22StepDistillScheduler,
    WanStepDistillScheduler,
)
from lightx2v.utils.set_config import set_parallel_config  # noqa: E402
from lightx2v_platform.registry_factory import PLATFORM_DEVICE_REGISTER  # noqa: E402

BOUNDARY = 0.875  # of its timestep from Wan2.2's first expert to its second
DISTILLED = {"infer_steps": 4, "denoising_step_list": [1000, 750, 500, 250], "boundary_step_index": 2}
"""Settings of LightX2V's own configurations for models of four steps."""
CACHES: dict[str, dict[str, Any]] = {
    "Tea": {"teacache_thresh": 1e9, "coefficients": [[1.0, 0.0]] * 2, "use_ret_steps": False},
    "Mag": {"magcache_ratios": [[1.0] * STEPS] * 2, "magcache_K": STEPS, "magcache_thresh": 1.0}
    | {"magcache_retention_ratio": 0.4, "magcache_calibration": False},
    "Ada": {},
}
"""Settings under which values of `feature_caching` skip a step."""


def settings(case: Case, ranks: int, mask: str | None) -> dict[str, Any]:
    config = MODELS[case.model].config(case.heads) if case.model in MODELS else settings_of_wan(case)
    config |= {"cfg_parallel": False, "seq_parallel": False, "parallel": False, "cpu_offload": False}
    config |= dict.fromkeys(("attn_type", "self_attn_1_type", "cross_attn_1_type", "cross_attn_2_type"), "torch_sdpa")
    config |= {"rms_norm_type": "torch", "layer_norm_type": "torch", "modulate_type": "torch"}
    config = {"rope_type": "torch_complex_rope", "infer_steps": STEPS} | config
    config |= {"feature_caching": "NoCaching", "enable_cfg": case.passes > 1}
    if case.cache is not None:
        config |= {"feature_caching": case.cache} | CACHES[case.cache]
    if ranks > 1:
        config["use_compile"] = case.compiled
        stock = "ring" if case.strategy and case.strategy.startswith("U1R") else "ulysses"
        guidance = 2 if case.cfg_parallel else 1
        config["parallel"] = {"seq_p_size": ranks // guidance, "seq_p_attn_type": stock if mask is None else "dbsp"}
        config["parallel"] |= {"cfg_p_size": guidance, **case.options}
        if mask is not None:
            config["parallel"]["dbsp"] = settings_of(mask) | {"strategy": case.strategy}
        set_parallel_config(config)
    elif mask is not None:
        config |= {"self_attn_1_type": "dbsp", "dbsp": mask}
    return config


def settings_of_wan(case: Case) -> dict[str, Any]:
    config: dict[str, Any] = {"task": "t2v", "model_cls": "wan2.2_moe" if case.pair else "wan2.1"}
    config |= {"num_layers": LAYERS, "num_heads": case.heads, "dim": case.heads * HEAD, "ffn_dim": 48, "freq_dim": 32}
    config |= {"in_dim": 4, "out_dim": 4, "patch_size": (1, 2, 2), "vae_stride": (4, 8, 8), "text_len": 7}
    config |= {"target_video_length": 9, "sample_shift": 5.0}
    config["sample_guide_scale"] = [2.0, 2.0] if case.pair else 2.0
    if case.pair:
        config["boundary"] = BOUNDARY
    if case.model == "distilled":
        config |= DISTILLED | {"model_cls": f"{config['model_cls']}_distill"}
    return config


def settings_of(mask: str) -> dict[str, Any]:
    return yaml.safe_load(Path(mask).read_text(encoding="utf-8")) if mask.endswith(".yaml") else {"mask": mask}


def tiny(case: Case, config: dict[str, Any], folder: Path) -> Any:
    models = []
    distilled = case.model == "distilled"
    for seed in (0, 1) if case.pair else (0,):
        file = folder / f"{os.environ['RANK']}-{seed}.safetensors"
        save_file(weights(case.heads, LAYERS, seed), file)
        cls = WanDistillModel if distilled else WanModel
        model = cls(str(file), config | {"dit_original_ckpt": str(file)}, torch.device("cpu"))
        for part in (model.pre_weight, model.transformer_weights):
            part.to_cuda()  # from what LightX2V takes for offloaded weights to its device
        models.append(model)
    if not case.pair:
        return models[0]
    if distilled:
        return MultiDistillModelStruct(models, config, config["boundary_step_index"])
    return MultiModelStruct(models, config, BOUNDARY)


def scheduler_of(case: Case, config: dict[str, Any]) -> WanScheduler:
    if case.model != "distilled":
        return WanScheduler(config)
    return Wan22StepDistillScheduler(config) if case.pair else WanStepDistillScheduler(config)


def denoise(case: Case, config: dict[str, Any], mask: str | None = None) -> tuple[list[torch.Tensor], int]:
    """Predictions of all steps and sizes, by torch under a mask, and of how many passes a step cache skipped."""
    outputs: list[torch.Tensor] = []
    skipped: list[int] = []
    with tempfile.TemporaryDirectory() as folder:
        model = tiny(case, config, Path(folder))
        scheduler = scheduler_of(case, config)
        model.set_scheduler(scheduler)
        if case.cache is not None:
            count_skipped(model.transformer_infer, skipped)
        for number, thw in enumerate(case.sizes):
            if mask is not None:
                mask_attention(model.model if case.pair else [model], mask, thw)
            latents, text = inputs_of(thw, number, 0, 0)
            inputs = {"context": text, "context_null": inputs_of(thw, number, 0, 1)[1]}
            scheduler.prepare(seed=number, latent_shape=list(latents.shape[1:]))
            for step in range(scheduler.infer_steps):
                scheduler.step_pre(step_index=step)
                model.infer({"text_encoder_output": inputs, "image_encoder_output": None})
                outputs.append(scheduler.noise_pred.clone())
                scheduler.step_post()
            scheduler.clear()
    return outputs, len(skipped)


def count_skipped(infer: Any, skipped: list[int]) -> None:
    stock = infer.infer_using_cache

    def use_cache(x: torch.Tensor) -> torch.Tensor:
        skipped.append(infer.scheduler.step_index)
        return stock(x)

    infer.infer_using_cache = use_cache


def mask_attention(models: list[Any], mask: str, thw: tuple[int, int, int]) -> None:
    for name, model in zip(("transformer", "transformer_2"), models, strict=False):
        for layer, block in enumerate(model.transformer_weights.blocks):

            def attend(q: Any, k: Any, v: Any, layer: int = layer, name: str = name, **_: Any) -> torch.Tensor:
                out = attend_under(mask, layer, LAYERS, thw, q[None], k[None], v[None], transformer=name)
                return out.flatten(2)[0]

            block.compute_phases[0].self_attn_1.apply = attend


def outputs_of(case: Case, config: dict[str, Any], mask: str | None = None) -> tuple[list[torch.Tensor], int]:
    if case.model not in MODELS:
        return denoise(case, config, mask)

    def attend(layer: int, thw: Any, *qkv: torch.Tensor, text: int) -> torch.Tensor:
        return attend_under(mask or "", layer, LAYERS, thw, *qkv, text=text)

    return MODELS[case.model].denoise(case, config, attend if mask else None), 0


def error_of(case: Case, ranks: int) -> dict[str, float]:
    alone = settings(case, 1, None)
    dense, _ = outputs_of(case, alone)
    expected = dense if case.mask is None else outputs_of(case, alone, case.mask)[0]
    found, skipped = outputs_of(case, settings(case, ranks, case.wrong or case.mask))
    return {"error": apart(found, expected), "dense": apart(dense, expected), "skipped": skipped}


def main() -> None:
    PLATFORM_DEVICE_REGISTER["cpu"].init_parallel_env()
    ulysses, ring = int(sys.argv[1]), int(sys.argv[2])
    for case in cases_of(sys.argv[3]):
        named = case.strategy or f"U{ulysses // (2 if case.cfg_parallel else 1)}R{ring}"
        case = replace(case, strategy=named)
        report(error_of, case, ulysses * ring)
    torch.distributed.destroy_process_group()


main()

"""SGLang Diffusion's own Wan, tiny and random, on CPU ranks, against one process of it: a line of JSON a case.

python -m scripts.checks.engines.sglang_cases ULYSSES RING CASES FILE        writes to FILE what one process computes
torchrun --nproc_per_node N -m scripts.checks.engines.sglang_cases …         compares with it

Replaced: two operators of sgl_kernel's CPU build, which is not on PyPI, by torch; the server's arguments, by those
that a transformer reads; torchvision, which PyPI has for GPUs alone and which is imported only.
"""

from __future__ import annotations

import functools
import os
import sys
from types import SimpleNamespace
from typing import Any

import torch

from scripts.checks.engines.reference import attend_under, fill, inputs_of, stand_in_for
from scripts.checks.engines.runs import LAYERS, STEPS, Case, cases_of, report

torch.set_num_threads(1)
ALONE = "WORLD_SIZE" not in os.environ
for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}.items():
    os.environ.setdefault(name, str(value))
stand_in_for(
    *("torchvision", "torchvision.transforms", "torchvision.transforms.functional"),
    *("torchvision.transforms.v2", "torchvision.transforms.v2.functional", "torchvision.io", "torchvision.utils"),
)
_OPERATORS = torch.library.Library("sgl_kernel", "DEF")
_TENSORS = "Tensor? weight, Tensor? bias, Tensor scale, Tensor shift, str kind, float eps"
_OPERATORS.define(f"fused_norm_scale_shift_cpu(Tensor x, {_TENSORS}) -> Tensor")
_RESIDUAL = f"Tensor residual, Tensor x, Tensor? gate, {_TENSORS}"
_OPERATORS.define(f"fused_scale_residual_norm_scale_shift_cpu({_RESIDUAL}) -> (Tensor, Tensor)")


def norm_scale_shift(x: Any, weight: Any, bias: Any, scale: Any, shift: Any, kind: str, eps: float) -> torch.Tensor:
    assert kind == "layer"
    return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps) * (1 + scale) + shift


def residual_norm_scale_shift(residual: Any, x: Any, gate: Any, *others: Any) -> tuple[torch.Tensor, torch.Tensor]:
    total = residual + (x if gate is None else x * gate)
    return norm_scale_shift(total, *others), total


_OPERATORS.impl("fused_norm_scale_shift_cpu", norm_scale_shift, "CPU")
_OPERATORS.impl("fused_scale_residual_norm_scale_shift_cpu", residual_norm_scale_shift, "CPU")

from sglang.multimodal_gen.runtime.platforms.plugins import apply_plugin_hooks, load_plugins  # noqa: E402
from sglang.multimodal_gen.runtime.server_args import set_global_server_args  # noqa: E402

set_global_server_args(
    SimpleNamespace(
        attention_backend=None,
        attention_backend_config=None,
        kv_gather_degree=1,
        sp_split_auto=False,
        pipeline_config=SimpleNamespace(dit_precision="fp32"),
        disable_autocast=True,
        enable_attention_backend_autotune=False,
    )
)
load_plugins()  # as each worker does
apply_plugin_hooks()

from sglang.multimodal_gen.configs.models.dits import WanVideoConfig  # noqa: E402
from sglang.multimodal_gen.runtime.distributed.parallel_state import (  # noqa: E402
    maybe_init_distributed_environment_and_model_parallel,
)
from sglang.multimodal_gen.runtime.managers.forward_context import set_forward_context  # noqa: E402
from sglang.multimodal_gen.runtime.models.dits.wanvideo import WanTransformer3DModel  # noqa: E402
from sglang.multimodal_gen.runtime.utils.precision import set_mixed_precision_policy  # noqa: E402


def tiny(heads: int, seed: int) -> WanTransformer3DModel:
    config = WanVideoConfig()
    sizes = {"num_attention_heads": heads, "attention_head_dim": 24, "hidden_size": heads * 24, "num_layers": LAYERS}
    sizes |= {"in_channels": 4, "out_channels": 4, "num_channels_latents": 4}
    config.update_model_arch(sizes | {"text_dim": 16, "freq_dim": 32, "ffn_dim": 48})
    model = WanTransformer3DModel(config, {}).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        parameter.data = fill(name, parameter.shape, generator)
    return model


def outputs_of(case: Case, mask: str | None = None) -> list[torch.Tensor]:
    """Of all passes; under a mask by torch's own attention, where one is given."""
    models = [tiny(case.heads, seed) for seed in ((0, 1) if case.pair else (0,))]
    outputs = []
    for number, thw in enumerate(case.sizes):
        if mask is not None:
            mask_attention(models, mask, thw)
        for step in range(STEPS):
            for branch in range(case.passes):
                latents, text = inputs_of(thw, number, step, branch)
                request = SimpleNamespace(
                    enable_sequence_shard=True,
                    enable_teacache=False,
                    enable_spectrum=False,
                    extra={},
                    is_cfg_negative=bool(branch),
                )
                model = models[-1 if step > 0 else 0]
                with torch.no_grad(), set_forward_context(step, None, request):
                    timestep = torch.tensor([900.0 - 300 * step])
                    outputs.append(model(latents, encoder_hidden_states=text, timestep=timestep))
    return outputs


def mask_attention(models: list[WanTransformer3DModel], mask: str, thw: tuple[int, int, int]) -> None:
    for model in models:
        for layer, block in enumerate(model.blocks):
            block.attn1.forward = functools.partial(attend_under, mask, layer, LAYERS, thw)


def error_of(case: Case, expected: list[torch.Tensor], dense: list[torch.Tensor]) -> dict[str, float]:
    os.environ["DBSP_CONFIG"] = case.wrong or case.mask or ""
    found = outputs_of(case)
    return {"error": worst(found, expected), "dense": worst(dense, expected)}


def worst(some: list[torch.Tensor], others: list[torch.Tensor]) -> float:
    return max(float((one - other).abs().max()) for one, other in zip(some, others, strict=True))


def main() -> None:
    ulysses, ring = (1, 1) if ALONE else (int(sys.argv[1]), int(sys.argv[2]))
    set_mixed_precision_policy(torch.float32, torch.float32)
    maybe_init_distributed_environment_and_model_parallel(
        tp_size=1, sp_size=ulysses * ring, ulysses_degree=ulysses, ring_degree=ring
    )
    torch.set_default_dtype(torch.float32)
    cases = cases_of(sys.argv[3])
    if ALONE:
        dense = [outputs_of(case) for case in cases]
        masked = [outputs_of(case, case.mask) if case.mask else dense[number] for number, case in enumerate(cases)]
        torch.save((masked, dense), sys.argv[4])
        return
    for case, expected, dense in zip(cases, *torch.load(sys.argv[4], weights_only=True), strict=True):
        try:
            report(error_of(case, expected, dense))
        except Exception as error:  # the engine's own refusal, on every rank before anything is sent
            report({"refused": f"{type(error).__name__}: {error}"})
    torch.distributed.destroy_process_group()


main()

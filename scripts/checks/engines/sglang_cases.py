"""SGLang Diffusion's own models, tiny and random, on CPU ranks, against one process of it: a line of JSON a case.

python -m scripts.checks.engines.sglang_cases ULYSSES RING CASES FILE        writes to FILE what one process computes
torchrun --nproc_per_node N -m scripts.checks.engines.sglang_cases …         compares with it

Replaced: what `sglang_stubs` lists; the server's arguments, by those that a transformer reads.
"""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

import torch

from dbsp_engines.sglang import attach
from scripts.checks.engines.reference import filled
from scripts.checks.engines.runs import STEPS, Case, cases_of, report
from tests.support.oracle import largest_difference

torch.set_num_threads(1)
ALONE = "WORLD_SIZE" not in os.environ
for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}.items():
    os.environ.setdefault(name, str(value))

import scripts.checks.engines.sglang_stubs  # noqa: E402, F401, I001  before SGLang
from cache_dit.caching.block_adapters.block_adapters import FakeDiffusionPipeline  # noqa: E402
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
        enable_cfg_parallel=False,
    )
)
load_plugins()  # as each worker does
apply_plugin_hooks()

from sglang.multimodal_gen.configs.sample.spectrum import SpectrumParams  # noqa: E402
from sglang.multimodal_gen.configs.sample.teacache import TeaCacheParams  # noqa: E402
from sglang.multimodal_gen.runtime.cache.cache_dit_integration import (  # noqa: E402
    CacheDitConfig,
    disable_cache_on_transformer,
    enable_cache_on_transformer,
)
from sglang.multimodal_gen.runtime.distributed.parallel_state import (  # noqa: E402
    get_classifier_free_guidance_rank,
    get_sp_group,
    get_sp_parallel_rank,
    get_sp_world_size,
    maybe_init_distributed_environment_and_model_parallel,
)
from sglang.multimodal_gen.runtime.managers.forward_context import set_forward_context  # noqa: E402
from sglang.multimodal_gen.runtime.utils.precision import set_mixed_precision_policy  # noqa: E402
from sglang.multimodal_gen.runtime.utils.torch_compile import (  # noqa: E402
    CompiledModuleRegistry,
    resolve_torch_compile_kwargs,
)

from scripts.checks.engines.sglang_models import CALLS, MODELS  # noqa: E402

Outputs = dict[tuple[int, int, int], torch.Tensor]

NAMES = ("transformer", "transformer_2")


def tiny(case: Case, seed: int) -> torch.nn.Module:
    """Makes a model. Under tensor parallelism its parameters are this rank's part of those of one process."""
    model = MODELS[case.model].make(case.heads).eval()
    if case.tensor == 1 or ALONE:
        filled(model, seed)
    else:
        whole = torch.load(f"{sys.argv[4]}.{case.model}.{case.heads}.{seed}", weights_only=True)
        for name, parameter in model.named_parameters():
            if parameter.shape == whole[name].shape:
                parameter.data.copy_(whole[name])
            else:
                parameter.weight_loader(parameter, whole[name])
    if os.environ.get("DBSP_CONFIG"):
        attach(model, NAMES[seed])  # as where a worker has built its pipeline
    return model


def outputs_of(case: Case, mask: str | None = None) -> tuple[Outputs, int]:
    """Returns outputs of this rank's passes by (size, step, CFG pass), and how often attention was computed.

    Args:
        mask: Under it torch's own attention computes them.
    """
    models = [tiny(case, seed) for seed in ((0, 1) if case.pair else (0,))]
    if case.tensor > 1 and ALONE:
        for seed, model in enumerate(models):
            parameters = {name: parameter.data for name, parameter in model.named_parameters()}
            torch.save(parameters, f"{sys.argv[4]}.{case.model}.{case.heads}.{seed}")
    if case.compiled and not ALONE:
        for model in models:
            how, _ = resolve_torch_compile_kwargs("SGLANG_TORCH_COMPILE_MODE", default="default", module=model)
            CompiledModuleRegistry().compile_once(model, compile_kwargs=how)
    kind, outputs = MODELS[case.model], {}
    CALLS.clear()
    for number, thw in enumerate(case.sizes):
        if mask is not None:
            for name, model in zip(NAMES, models, strict=False):
                kind.mask(model, mask, thw, name)
        if case.cache == "cache_dit":
            enable_cache_dit(models[0], case)
        request = request_of(case, thw)
        for step in range(STEPS):
            for branch in branches_of(case):
                request.is_cfg_negative = bool(branch)
                model = models[-1 if step > 0 else 0]
                with torch.no_grad(), set_forward_context(step, None, request):
                    own = own_frames if case.frames else lambda latents: latents
                    outputs[number, step, branch] = kind.outputs(model, thw, number, step, branch, own)
        if case.cache == "cache_dit":
            disable_cache_on_transformer(models[0])
            FakeDiffusionPipeline._is_cached = False  # cache-dit 1.5.0 leaves it on the class
    sessions = [model._dbsp_transformer.session.session for model in models if os.environ.get("DBSP_CONFIG")]
    return outputs, sum(session.reuse.calls for session in sessions) if sessions else len(CALLS)


def request_of(case: Case, thw: tuple[int, int, int]) -> SimpleNamespace:
    options = dict(case.cache_options)
    if case.unlike and case.cache == "teacache":
        options["teacache_thresh"] = options["teacache_thresh"] if get_sp_parallel_rank() == 0 else 0.0
    kind = MODELS[case.model]
    is_cut = case.frames or kind.is_image  # by the pipeline, not by the transformer
    return SimpleNamespace(
        enable_sequence_shard=not is_cut,
        did_sp_shard_latents=is_cut,
        enable_teacache=case.cache == "teacache",
        teacache_params=TeaCacheParams(**options) if case.cache == "teacache" else None,
        enable_spectrum=case.cache == "spectrum",
        spectrum_params=SpectrumParams(**options) if case.cache == "spectrum" else None,
        do_classifier_free_guidance=case.passes > 1,
        num_inference_steps=STEPS,
        extra={},
        **kind.latents(thw),
    )


def enable_cache_dit(model: torch.nn.Module, case: Case) -> None:
    """Enables Cache-DiT for a request, as a denoising stage does it."""
    if hasattr(model, "set_cache_dit_input_preservation"):
        model.set_cache_dit_input_preservation(True)
    config = CacheDitConfig(enabled=True, num_inference_steps=STEPS, **case.cache_options)
    group = None if ALONE else get_sp_group().device_group
    enable_cache_on_transformer(model, config, sp_group=group, has_separate_cfg=case.passes > 1)


def branches_of(case: Case) -> tuple[int, ...]:
    return (get_classifier_free_guidance_rank(),) if case.cfg_parallel and not ALONE else tuple(range(case.passes))


def own_frames(video: torch.Tensor) -> torch.Tensor:
    return video.chunk(get_sp_world_size(), dim=2)[get_sp_parallel_rank()]


def error_of(case: Case, expected: Outputs, dense: Outputs, calls: int) -> dict[str, Any]:
    os.environ["DBSP_CONFIG"] = case.wrong or case.mask or ""
    error, (outputs, own_calls) = 0.0, outputs_of(case)
    for key, found in outputs.items():
        whole = own_frames(expected[key]) if case.frames else expected[key]
        error = max(error, largest_difference(found, whole))
    of_ranks = torch.tensor([error, own_calls, -own_calls], dtype=torch.float64)
    torch.distributed.all_reduce(of_ranks, torch.distributed.ReduceOp.MAX)
    return {
        "error": float(of_ranks[0]),
        "dense": max(largest_difference(dense[key], expected[key]) for key in expected),
        "calls": {"fewest": int(-of_ranks[2]), "most": int(of_ranks[1]), "one process": calls},
    }


def main() -> None:
    cases = cases_of(sys.argv[3])
    ulysses, ring = (1, 1) if ALONE else (int(sys.argv[1]), int(sys.argv[2]))
    guidance = 2 if cases[0].cfg_parallel and not ALONE else 1
    tensor = 1 if ALONE else cases[0].tensor
    set_mixed_precision_policy(torch.float32, torch.float32)
    maybe_init_distributed_environment_and_model_parallel(
        tp_size=tensor,
        cfg_degree=guidance,
        sp_size=ulysses * ring // guidance // tensor,
        ulysses_degree=ulysses // guidance // tensor,
        ring_degree=ring,
    )
    torch.set_default_dtype(torch.float32)
    if ALONE:
        dense = [outputs_of(case) for case in cases]
        masked = [outputs_of(case, case.mask) if case.mask else dense[number] for number, case in enumerate(cases)]
        references = [(expected, plain, calls) for (expected, calls), (plain, _) in zip(masked, dense, strict=True)]
        torch.save(references, sys.argv[4])
        return
    for case, reference in zip(cases, torch.load(sys.argv[4], weights_only=True), strict=True):
        report(error_of, case, *reference)
    torch.distributed.destroy_process_group()


main()

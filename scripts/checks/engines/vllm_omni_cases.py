"""vLLM-Omni's own models, tiny and random, on CPU ranks, against one process of it: a line of JSON a case.

torchrun --nproc_per_node N -m scripts.checks.engines.vllm_omni_cases ULYSSES RING CASES FILE

Replaced: vLLM-Omni's platform (it has none for CPUs), and torchvision, which PyPI has for GPUs alone; its
image-to-video pipelines, which are not used here, import it.
"""

from __future__ import annotations

import os
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import _dynamo as dynamo

from scripts.checks.engines.reference import filled, stub_for_torchvision
from scripts.checks.engines.runs import STEPS, Case, cases_of, report
from tests.support.oracle import largest_difference

stub_for_torchvision()

from vllm.config import set_current_vllm_config  # noqa: E402
from vllm_omni.diffusion import registry  # noqa: E402
from vllm_omni.diffusion.cache.selector import get_cache_backend  # noqa: E402
from vllm_omni.diffusion.compile import regionally_compile  # noqa: E402
from vllm_omni.diffusion.config import set_current_diffusion_config  # noqa: E402
from vllm_omni.diffusion.data import AttentionConfig, DiffusionParallelConfig, OmniDiffusionConfig  # noqa: E402
from vllm_omni.diffusion.distributed.parallel_state import (  # noqa: E402
    init_distributed_environment,
    initialize_model_parallel,
)
from vllm_omni.diffusion.forward_context import get_forward_context, set_forward_context  # noqa: E402
from vllm_omni.diffusion.vllm_config import create_diffusion_vllm_config  # noqa: E402
from vllm_omni.plugins import OMNI_DEFAULT_PLUGINS_GROUP, load_omni_plugins_by_group  # noqa: E402

from scripts.checks.engines.vllm_omni_models import MODELS  # noqa: E402


def settings(ulysses: int, ring: int, backend: str | None, **options: Any) -> OmniDiffusionConfig:
    return OmniDiffusionConfig(
        parallel_config=DiffusionParallelConfig(
            ulysses_degree=ulysses, ring_degree=ring, sequence_parallel_size=ulysses * ring
        ),
        diffusion_attention_config=AttentionConfig(per_role={} if backend is None else {"self": backend}),
        dtype=torch.float32,
        **options,
    )


def tiny(config: OmniDiffusionConfig, vllm_config: Any, case: Case, seed: int) -> torch.nn.Module:
    with set_current_diffusion_config(config), set_forward_context(vllm_config, config):
        model = filled(MODELS[case.model].make(config, case.heads).eval(), seed)
    for module in model.modules():  # what vLLM's loader does after loading
        if getattr(module, "quant_method", None) is not None:
            module.quant_method.process_weights_after_loading(module)
    return model


class Pipeline(torch.nn.Module):
    def __init__(self, *transformers: torch.nn.Module) -> None:
        super().__init__()
        self.transformer, self.transformer_2 = transformers[0], transformers[-1] if transformers[1:] else None


def error_of(case: Case, ulysses: int, ring: int) -> dict[str, Any]:
    alone = settings(1, 1, None)
    parallel = settings(ulysses, ring, None if case.mask is None else "DBSP", **case.options)
    parallel.cache_backend = case.cache or "none"
    vllm_config = create_diffusion_vllm_config(torch.device("cpu"), parallel)
    os.environ["DBSP_CONFIG"] = configuration(case)
    seeds, model = (0, 1) if case.pair else (0,), MODELS[case.model]
    with torch.no_grad(), set_current_vllm_config(vllm_config):
        pipeline = Pipeline(*(tiny(parallel, vllm_config, case, seed) for seed in seeds))
        with set_forward_context(vllm_config, parallel):
            registry._apply_sequence_parallel_if_enabled(pipeline, parallel)
            applied = get_forward_context().sp_plan_hooks_applied
        enable_cache(pipeline, case)
        if case.compiled:
            regionally_compile(pipeline.transformer, dynamic=parallel.diffusion_compile_dynamic)
        worst, dense_away, padding, calls, graphs = 0.0, 0.0, 0, 0, []
        dynamo.utils.counters.clear()
        lengths: tuple[int | None, int] = None, 0
        for number, thw in enumerate(case.sizes):
            references = [tiny(alone, vllm_config, case, seed) for seed in seeds]
            if not case.unlike:
                enable_cache(Pipeline(*references), case)
            for step in range(STEPS):
                for branch in range(case.passes):
                    inputs = model.inputs(thw, number, step, branch)
                    if case.cache:
                        inputs |= unlike_on_ranks(inputs, model.inputs(thw, number, 0, branch))
                    second = case.pair and step > 0
                    one = references[-1 if second else 0]
                    with set_forward_context(vllm_config, alone), as_one_process():
                        expected = dense = None if case.cache else numbers_of(one(**inputs))
                        if case.mask is not None:
                            undo = model.mask_attention(one, case, thw, "transformer_2" if second else "transformer")
                            expected = numbers_of(one(**inputs))
                            calls += undo()
                    ours = pipeline.transformer_2 if second else pipeline.transformer
                    index = step if model.says_step else None
                    with set_forward_context(vllm_config, parallel, denoise_step_idx=index):
                        context = get_forward_context()
                        context.sp_plan_hooks_applied = applied
                        if case.mask is not None:  # a request's stages have one context, also of several sizes
                            context.sp_original_seq_len, context.sp_padding_size = lengths
                        out = numbers_of(ours(**inputs))
                        lengths = context.sp_original_seq_len, context.sp_padding_size
                        padding = max(padding, lengths[1])
                    graphs.append(dynamo.utils.counters["stats"]["unique_graphs"])
                    worst = max(worst, largest_difference(out, expected))
                    dense_away = max(dense_away, 0.0 if case.cache else largest_difference(dense, expected))
    return {"error": worst, "dense": dense_away, "padding": padding, "calls": calls, "graphs": graphs} | {
        "breaks": dict(dynamo.utils.counters["graph_break"])
    }


def configuration(case: Case) -> str:
    """Returns the value of $DBSP_CONFIG: a mask, or a file where the strategy is not the engine's degrees."""
    mask = case.wrong or case.mask or ""
    if case.strategy is None:
        return mask
    mine, file = (Path(sys.argv[4]).with_name(f"{name}.yaml") for name in (os.environ["RANK"], "of_all"))
    mine.write_text(f"mask: {mask}\nstrategy: {case.strategy}\n", encoding="utf-8")
    mine.replace(file)  # at once: another rank may be reading it
    return str(file)


def enable_cache(pipeline: Pipeline, case: Case) -> None:
    """Enables the engine's step cache, as its worker enables it, with thresholds by which it skips layers.

    Where a case says so, what cache-dit decides on this rank is replaced by what differs between ranks: then no layer
    may be skipped.
    """
    if not case.cache:
        return
    options = {"max_warmup_steps": 1, "residual_diff_threshold": 0.99} | case.cache_options
    backend = get_cache_backend(case.cache, options)
    backend.enable(pipeline)
    backend.refresh(pipeline, STEPS)
    if case.unlike:
        manager = pipeline.transformer._context_manager
        manager.similarity = lambda *states, **options: torch.distributed.get_rank() == 0


def unlike_on_ranks(inputs: dict[str, Any], first: dict[str, Any]) -> dict[str, Any]:
    """Tokens of the first half, and the time, as they were in the first step: nothing has changed for rank 0 of 2."""
    now, then = inputs["hidden_states"], first["hidden_states"]
    half = now.shape[1] // 2 if now.ndim == 3 else 0
    mixed = torch.cat([then[:, :half], now[:, half:]], dim=1)
    return {"hidden_states": mixed, "timestep": first["timestep"]}


def as_one_process() -> AbstractContextManager[Any]:
    """Patches HunyuanVideo-1.5, which asks vLLM-Omni's groups, not its configuration, whether to shard."""
    module = "vllm_omni.diffusion.models.hunyuan_video.hunyuan_video_15_transformer"
    return mock.patch(f"{module}.get_sequence_parallel_world_size", return_value=1)


def numbers_of(output: Any) -> torch.Tensor:
    if not isinstance(output, tuple):
        return output.sample
    parts = output[0] if isinstance(output[0], list) else output  # Z-Image's images, and what else it returns
    return torch.cat([one.flatten() for one in parts])


def main() -> None:
    torch.set_num_threads(1)
    ulysses, ring = int(sys.argv[1]), int(sys.argv[2])
    for plugin in load_omni_plugins_by_group(OMNI_DEFAULT_PLUGINS_GROUP).values():  # as each worker does
        plugin()
    parallel = settings(ulysses, ring, None)
    vllm_config = create_diffusion_vllm_config(torch.device("cpu"), parallel)
    with set_forward_context(vllm_config, parallel), set_current_vllm_config(vllm_config):
        init_distributed_environment(world_size=int(os.environ["WORLD_SIZE"]), rank=int(os.environ["RANK"]))
        initialize_model_parallel(
            sequence_parallel_size=ulysses * ring, ulysses_degree=ulysses, ring_degree=ring, data_parallel_size=1
        )
    for case in cases_of(sys.argv[3]):
        report(error_of, case, ulysses, ring)
    torch.distributed.destroy_process_group()


main()

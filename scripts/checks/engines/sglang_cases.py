"""SGLang Diffusion's own models, tiny and random, on CPU ranks, against one process of it: a line of JSON a case.

python -m scripts.checks.engines.sglang_cases ULYSSES RING CASES FILE        writes to FILE what one process computes
torchrun --nproc_per_node N -m scripts.checks.engines.sglang_cases …         compares with it

Replaced: what `sglang_stubs` lists; the server's arguments, by those that a transformer reads.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from dbsp_engines.sglang import attach
from scripts.checks.engines.reference import filled
from scripts.checks.engines.runs import STEPS, Case, cases_of, report
from scripts.checks.engines.sglang_stubs import put_in_place
from scripts.checks.engines.turns import take_turns
from tests.support.oracle import largest_difference

torch.set_num_threads(1)
ALONE = "WORLD_SIZE" not in os.environ
for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}.items():
    os.environ.setdefault(name, str(value))
put_in_place()

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

from sglang.multimodal_gen.runtime.distributed.parallel_state import (  # noqa: E402
    get_classifier_free_guidance_rank,
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

from scripts.checks.engines.sglang_models import MODELS  # noqa: E402

NAMES = ("transformer", "transformer_2")


def tiny(case: Case, seed: int) -> torch.nn.Module:
    model = filled(MODELS[case.model].make(case.heads).eval(), seed)
    if os.environ.get("DBSP_CONFIG"):
        attach(model, NAMES[seed])  # as where a worker has built its pipeline
    return model


def stepper(case: Case) -> Callable[[int], torch.Tensor]:
    """Returns a function of the step's number that makes one forward pass, for `take_turns`."""
    model, kind, (thw,) = tiny(case, 0), MODELS[case.model], case.sizes

    def step(number: int) -> torch.Tensor:
        request = SimpleNamespace(
            enable_sequence_shard=True,
            did_sp_shard_latents=False,
            enable_teacache=False,
            enable_spectrum=False,
            extra={},
            is_cfg_negative=False,
            raw_latent_shape=(1, kind.channels, thw[0], 2 * thw[1], 2 * thw[2]),
        )
        with set_forward_context(number, None, request):
            return kind.outputs(model, thw, 0, number, 0, lambda latents: latents)

    return step


def outputs_of(case: Case, mask: str | None = None) -> dict[tuple[int, int, int], torch.Tensor]:
    """Returns outputs of this rank's passes by (size, step, CFG pass); under a mask, by torch's own attention."""
    models = [tiny(case, seed) for seed in ((0, 1) if case.pair else (0,))]
    if case.compiled and not ALONE:
        for model in models:
            how, _ = resolve_torch_compile_kwargs("SGLANG_TORCH_COMPILE_MODE", default="default", module=model)
            CompiledModuleRegistry().compile_once(model, compile_kwargs=how)
    kind, outputs = MODELS[case.model], {}
    for number, thw in enumerate(case.sizes):
        if mask is not None:
            for name, model in zip(NAMES, models, strict=False):
                kind.mask(model, mask, thw, name)
        for step in range(STEPS):
            for branch in branches_of(case):
                request = SimpleNamespace(
                    enable_sequence_shard=not case.frames,
                    did_sp_shard_latents=case.frames,
                    enable_teacache=False,
                    enable_spectrum=False,
                    extra={},
                    is_cfg_negative=bool(branch),
                    raw_latent_shape=(1, kind.channels, thw[0], 2 * thw[1], 2 * thw[2]),
                )
                model = models[-1 if step > 0 else 0]
                with torch.no_grad(), set_forward_context(step, None, request):
                    own = own_frames if case.frames else lambda latents: latents
                    outputs[number, step, branch] = kind.outputs(model, thw, number, step, branch, own)
    return outputs


def branches_of(case: Case) -> tuple[int, ...]:
    """Returns the CFG passes of this rank."""
    return (get_classifier_free_guidance_rank(),) if case.cfg_parallel and not ALONE else tuple(range(case.passes))


def own_frames(video: torch.Tensor) -> torch.Tensor:
    return video.chunk(get_sp_world_size(), dim=2)[get_sp_parallel_rank()]


def error_of(case: Case, expected: dict[Any, torch.Tensor], dense: dict[Any, torch.Tensor]) -> dict[str, float]:
    os.environ["DBSP_CONFIG"] = case.wrong or case.mask or ""
    error = 0.0
    for key, found in outputs_of(case).items():
        whole = own_frames(expected[key]) if case.frames else expected[key]
        error = max(error, largest_difference(found, whole))
    of_ranks = torch.tensor(error, dtype=torch.float64)
    torch.distributed.all_reduce(of_ranks, torch.distributed.ReduceOp.MAX)
    return {"error": float(of_ranks), "dense": max(largest_difference(dense[key], expected[key]) for key in expected)}


def main() -> None:
    cases = cases_of(sys.argv[3])
    ulysses, ring = (1, 1) if ALONE else (int(sys.argv[1]), int(sys.argv[2]))
    guidance = 2 if cases[0].cfg_parallel and not ALONE else 1
    set_mixed_precision_policy(torch.float32, torch.float32)
    maybe_init_distributed_environment_and_model_parallel(
        tp_size=1,
        cfg_degree=guidance,
        sp_size=ulysses * ring // guidance,
        ulysses_degree=ulysses // guidance,
        ring_degree=ring,
    )
    torch.set_default_dtype(torch.float32)
    if ALONE:
        dense = [outputs_of(case) for case in cases]
        masked = [outputs_of(case, case.mask) if case.mask else dense[number] for number, case in enumerate(cases)]
        torch.save((masked, dense), sys.argv[4])
        return
    if cases[0].turns:
        report(lambda: take_turns(cases[0], stepper(cases[0])))
        torch.distributed.destroy_process_group()
        return
    for case, expected, dense in zip(cases, *torch.load(sys.argv[4], weights_only=True), strict=True):
        report(error_of, case, expected, dense)
    torch.distributed.destroy_process_group()


main()

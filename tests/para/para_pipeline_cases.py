"""What the workers run: whole tiny pipelines under dbsp_para, against one process and against themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dbsp_para
from tests.para.para_cases import para_mesh
from tests.support import user_masks
from tests.support.models.tiny_pipelines import SIZE, alone, difference, latents, load, state_of, used_state
from tests.support.references import kept_from_rank_0, mask_settings

OTHER_SIZE = SIZE | {"height": 80, "width": 64, "num_inference_steps": 3}


def expected_alone(pipe: Any, model: str, config: dict[str, Any], **options: Any) -> torch.Tensor:
    """What one process makes with a tiny model that all tests make identically, worked out on one rank."""
    key = ("video of", model, mask_settings(config), options)
    made: torch.Tensor = kept_from_rank_0(key, lambda: alone(pipe, config, **options))
    return made


def run_pipeline(
    rank: int, world: int, model: str, folder: str, config: dict[str, Any], mesh: dict[str, int], through: str
) -> tuple[float, float, float]:
    """(difference of the latents from one process, from dense attention, sum of unseeded latents).

    through: "dbsp_para", or "para_attn" for its own function
    """
    from para_attn.context_parallel import diffusers_adapters

    pipe = load(model, folder)
    dense = kept_from_rank_0(("dense video of", model), lambda: latents(pipe))
    expected = expected_alone(pipe, model, config)
    before = used_state(pipe)
    if through == "para_attn":
        diffusers_adapters.parallelize_pipe(pipe, mesh=para_mesh(world, **mesh), attn="dbsp", config=config)
    else:
        dbsp_para.parallelize_pipe(pipe, mesh=para_mesh(world, **mesh), config=config)
    out = latents(pipe)
    torch.manual_seed(rank)  # ranks would draw different noise
    unseeded = latents(pipe, seed=None, num_inference_steps=1)
    dbsp_para.unparallelize(pipe)
    assert state_of(pipe) == before
    assert torch.equal(latents(pipe), dense)
    return difference(out, expected), difference(out, dense), float(unseeded.double().sum())


def run_two_of_a_class(rank: int, world: int, folder: str, config: dict[str, Any]) -> None:
    """Two pipelines of one class, parallelized through para-attn and undone in the order they were made."""
    from para_attn.context_parallel.diffusers_adapters import parallelize_pipe

    first = load("wan", folder)
    second = type(first)(**first.components)
    second.transformer = type(first.transformer).from_pretrained(folder, subfolder="transformer")
    second.set_progress_bar_config(disable=True)
    expected, before = kept_from_rank_0(("video of", config), lambda: alone(first, config)), used_state(first)
    for pipe in (first, second):
        parallelize_pipe(pipe, mesh=para_mesh(world), attn="dbsp", config=config)
    for pipe in (first, second):
        assert difference(latents(pipe), expected) <= 1e-5
        torch.manual_seed(rank)
        unseeded = latents(pipe, seed=None, num_inference_steps=1)
        assert len({float(sum(total)) for total in _everyones(unseeded, world)}) == 1
        dbsp_para.unparallelize(pipe)
    assert state_of(first) == before


def _everyones(tensor: torch.Tensor, world: int) -> list[list[float]]:
    everyones = [torch.empty(1, dtype=torch.float64) for _ in range(world)]
    torch.distributed.all_gather(everyones, tensor.double().sum().reshape(1))
    return [one.tolist() for one in everyones]


def run_generations(rank: int, world: int, model: str, folder: str, config: dict[str, Any]) -> list[float]:
    """Generations in one process, each of them against a fresh run of the same: the differences.

    The second and third have the last one's first timestep at once, or another size, prompt and number of steps.
    """
    pipe = load(model, folder)
    runs: list[dict[str, Any]] = [
        {"num_inference_steps": 1},
        {"num_inference_steps": 1, "prompt": "a cat runs"},
        {**OTHER_SIZE, "prompt": "a red ball", "seed": 5},
        {},
    ]
    dbsp_para.parallelize_pipe(pipe, config=config)
    one_after_the_other = [latents(pipe, **run) for run in runs]
    dbsp_para.unparallelize(pipe)
    differences = []
    for run, out in zip(runs, one_after_the_other, strict=True):
        dbsp_para.parallelize_pipe(pipe, config=config)
        differences.append(difference(out, latents(pipe, **run)))
        dbsp_para.unparallelize(pipe)
    return differences


def run_after_failures(
    rank: int, world: int, model: str, folder: str, config: dict[str, Any]
) -> tuple[list[str], list[float]]:
    """(how generations failed on this rank, differences of the ones after each from one process)."""
    pipe = load(model, folder)
    user_masks.FAILS.clear()
    expected = expected_alone(pipe, model, config)
    dbsp_para.parallelize_pipe(pipe, config=config)
    failures, differences = [], []

    def stop(at: int) -> Any:
        def callback(pipe: Any, step: int, timestep: Any, kept: dict[str, Any]) -> dict[str, Any]:
            if step == at:
                raise KeyboardInterrupt("stopped")
            return kept

        return callback

    def fails(**options: Any) -> None:
        with pytest.raises((ValueError, KeyboardInterrupt)) as caught:
            latents(pipe, **options)
        failures.append(f"{type(caught.value).__name__}: {caught.value}")
        user_masks.FAILS.clear()
        differences.append(difference(latents(pipe), expected))

    fails(callback_on_step_end=stop(0))
    fails(callback_on_step_end=stop(1))
    for step in (2, 3):  # whose masks are not kept from the videos before
        user_masks.FAILS.add((1, step))
        fails(num_inference_steps=step + 1)
    dbsp_para.unparallelize(pipe)
    return failures, differences


def run_cached(
    rank: int,
    world: int,
    model: str,
    folder: str,
    config: dict[str, Any],
    cache: dict[str, Any],
    cache_first: bool,
    mesh: dict[str, int],
) -> tuple[float, float, list[int], list[int]]:
    """With para-attn's first-block cache.

    returns: difference from one process with the same cache, from the same without cache; layers computed at each pass
             in one process, and in parallel
    """
    from para_attn.first_block_cache.diffusers_adapters import apply_cache_on_pipe

    # In float64: after six steps, latents of 11 have been rounded to within 1.5e-5 in float32.
    options = {"num_inference_steps": 6}

    def reference() -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        pipe = load(model, folder).to(torch.float64)
        uncached = alone(pipe, config, **options)
        apply_cache_on_pipe(pipe, **cache)
        passes = _count_layers(pipe.transformer)
        return uncached, alone(pipe, config, **options), passes()

    uncached, expected, expected_passes = kept_from_rank_0(("cached", model, config, cache), reference)
    pipe = load(model, folder).to(torch.float64)
    if cache_first:
        apply_cache_on_pipe(pipe, **cache)
    dbsp_para.parallelize_pipe(pipe, mesh=para_mesh(world, **mesh), config=config)
    if not cache_first:
        apply_cache_on_pipe(pipe, **cache)
    passes = _count_layers(pipe.transformer)
    out, out_passes = latents(pipe, **options), passes()
    dbsp_para.unparallelize(pipe)

    assert difference(alone(pipe, config, **options), expected) <= 1e-6, "the cache goes on without db-SP"
    dbsp_para.parallelize_pipe(pipe, mesh=para_mesh(world, **mesh), config=config)
    assert difference(latents(pipe, **options), out) <= 1e-6
    dbsp_para.unparallelize(pipe)
    return difference(out, expected), difference(expected, uncached), expected_passes, out_passes


def _count_layers(transformer: torch.nn.Module) -> Any:
    """Counts blocks run in each pass from now on; call the result to read and stop."""
    counts: list[int] = []
    blocks = getattr(transformer, "blocks", None) or transformer.transformer_blocks

    def another(*_: Any) -> None:
        counts[-1] += 1

    handles = [transformer.register_forward_pre_hook(lambda *_: counts.append(0))]
    handles += [block.register_forward_hook(another) for block in blocks]

    def read() -> list[int]:
        for handle in handles:
            handle.remove()
        return counts

    return read

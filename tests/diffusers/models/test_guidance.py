"""Guidance parallelism: two halves of the ranks compute a step's two CFG passes, as one process does."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch

import dbsp_diffusers
from dbsp_core.utils.errors import UserError
from dbsp_diffusers.models.transformers import transformers_of
from dbsp_diffusers.sharding.halves import Halves
from tests.diffusers.models.pipeline_cases import CASES, Case, make_pipe
from tests.support.models.tiny_pipelines import attach_pipeline, fingerprint
from tests.support.models.tiny_transformers import make_tiny_transformer, tiny_inputs
from tests.support.outcomes import apart, assert_near, said
from tests.support.shared import shared

MASKS: dict[str, dict[str, Any]] = {
    "dense": {"source": "dense", "block_q": 16, "block_k": 16},
    "synthetic": {"source": "synthetic", "density": 0.4, "block_q": 8, "block_k": 8},
    "sparge": {"source": "sparge", "cdf": 0.5, "similarity": 0.1, "block_q": 4, "block_k": 4, "dense_text": False},
}
STEPS = 3


@dataclass(frozen=True)
class Guided:
    """A pipeline of `CASES`, by name, and its call.

    Attributes:
        two: Whether a second transformer takes the late steps (Wan2.2).
        cache: Threshold of a first-block cache, or None.
        call: Arguments that are not the case's own, as pairs.
    """

    pipeline: str = "WanPipeline"
    mask: str = "synthetic"
    strategy: str | None = None
    two: bool = False
    cache: float | None = None
    call: tuple[tuple[str, Any], ...] = field(default=())

    @property
    def case(self) -> Case:
        return next(case for case in CASES if case.pipeline == self.pipeline)

    @property
    def config(self) -> dict[str, Any]:
        return {"mask": MASKS[self.mask], "strategy": self.strategy, "dense_schedule": {"first_steps": 1}}

    def pipe(self) -> Any:
        pipe = make_pipe(self.case, torch.float32, **({} if self.cache is None else {"num_layers": 2}))
        if self.two:
            second = make_tiny_transformer("wan", seed=7, num_layers=1)
            pipe.register_modules(transformer_2=second)
            pipe.register_to_config(boundary_ratio=0.95)  # the first of three steps is before it
        if self.cache is not None:
            from diffusers.hooks import FirstBlockCacheConfig

            pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=self.cache))
        return pipe

    def made(self, pipe: Any, **more: Any) -> torch.Tensor:
        options = _arguments(self) | {"generator": torch.Generator().manual_seed(3), "num_inference_steps": STEPS}
        output = "pt" if self.pipeline == "QwenImageLayeredPipeline" else "latent"
        with self.case.around(torch.float32):
            found = pipe(output_type=output, return_dict=False, **options | dict(self.call) | more)[0]
        return found if isinstance(found, torch.Tensor) else torch.stack(list(found))


@shared
def _arguments(guided: Guided) -> dict[str, Any]:
    """Returns the arguments of the case's call, with another negative prompt than prompt."""
    torch.manual_seed(1)
    arguments = guided.case.arguments(torch.float32)
    turned = {name for name, one in arguments.items() if name.startswith("negative_prompt_embeds") and one.ndim == 3}
    return arguments | {name: -arguments[name] for name in turned if arguments[name].is_floating_point()}


@shared
def in_one_process(guided: Guided) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns latents of dense attention, and of the configuration's masks."""
    pipe = guided.pipe()
    dense = guided.made(pipe)
    attach_pipeline(pipe, guided.config)
    return dense, guided.made(pipe)


def run_guided(rank: int, world: int, guided: Guided, passes: float = 1, wrong: bool = False) -> None:
    """Makes two calls of a pipeline in two halves, and one after `disable`.

    passes: how many a half computes in a step;  wrong: whether the outputs must be others, for a negative control
    """
    dense, expected = in_one_process(guided)
    pipe = guided.pipe()
    guided.made(pipe, num_inference_steps=1)  # which leaves attributes of its own
    before = [fingerprint(one) for one in transformers_of(pipe).values()]
    session = dbsp_diffusers.enable(pipe, guided.config, guidance=True)
    made = [guided.made(pipe) for _ in range(2)]
    sessions = dbsp_diffusers.sessions_of(pipe).values()
    calls = sum(one.statistics()["calls"] for one in sessions) / (len(made) * STEPS * session.layers)
    dbsp_diffusers.disable(pipe)
    assert before == [fingerprint(one) for one in transformers_of(pipe).values()], "disable left something behind"
    if guided.cache is None:
        assert apart(guided.made(pipe), dense) == 0
    assert session.group.size == world // 2
    assert calls == pytest.approx(passes)
    for one in made:
        if wrong:
            assert apart(one, expected) > 1e-3
        else:
            assert_near(one, expected, dense if guided.cache is None else None)


MILD = (("guidance_scale", 2.0),)
"""Guidance multiplies rounding by its scale."""
GUIDED = {
    "static masks": (2, Guided()),
    "predicted masks": (4, Guided(mask="sparge", strategy="U1R2")),
    "strategy auto": (4, Guided(strategy="auto")),
    "two transformers": (4, Guided(mask="sparge", two=True)),
    "control video": (2, Guided("WanVACEPipeline")),
    "sliced outputs": (2, Guided("QwenImagePipeline", "sparge")),
    "guider": (4, Guided("HunyuanVideo15Pipeline")),
    "edited image": (2, Guided("QwenImageEditPipeline", "sparge")),
    "edited images": (2, Guided("QwenImageEditPlusPipeline", "sparge")),
    "layers": (2, Guided("QwenImageLayeredPipeline", "sparge")),
    "ovis": (2, Guided("OvisImagePipeline", call=MILD)),
    "one batch": (4, Guided("CogVideoXPipeline", "sparge", "U1R2", call=MILD)),
}


@pytest.mark.parametrize("name", GUIDED)
def test_halves_equal_one_process(threads, name):
    world, guided = GUIDED[name]
    threads(world).run(run_guided, guided)


def test_first_block_cache_skips_what_one_process_skips(threads):
    """Computes two layers in the first step, and one in each step after it."""
    threads(4).run(run_guided, Guided(cache=10.0, strategy="U1R2"), (1 + 1 / 2 + 1 / 2) / 3)


def test_pass_without_a_second_one_is_right_and_logged(threads, caplog):
    caplog.set_level("WARNING", "dbsp")
    threads(4).run(run_guided, Guided("QwenImagePipeline", "sparge", call=(("true_cfg_scale", 1.0),)))
    assert [one.getMessage() for one in caplog.records if "without a second one" in one.getMessage()]


def test_outputs_of_one_half_alone_are_another_video(threads):
    """Shows as a negative control that without the exchange both passes of guidance are one."""
    with mock.patch.object(Halves, "exchange", lambda halves, mine: (mine, mine)):
        threads(2).run(run_guided, Guided(), 1, True)


REJECTED: dict[str, tuple[dict[str, Any], str]] = {
    "odd": ({"guidance": True}, "guidance=True halves the ranks, and there are 3"),
    "class": ({"guidance": True}, "the two CFG passes of LTXVideoTransformer3DModel"),
    "value": ({"guidance": "both"}, "guidance must be True or False, got 'both'"),
    "mesh": ({"guidance": True, "mesh": object()}, "a mesh says how all of them are used"),
    "auto": ({"guidance": "auto"}, "guidance must be True or False, got 'auto'"),
    "on one rank": ({"guidance": True}, "differ"),
}
"""Arguments of `enable`, on the last rank, and what it says."""


def rejected_by_enable(rank: int, world: int, name: str) -> None:
    pipe = Guided("LTXPipeline" if name == "class" else "WanPipeline").pipe()
    before, (options, part) = fingerprint(pipe.transformer), REJECTED[name]
    if rank != world - 1 and name.endswith("one rank"):
        options = {"guidance": name != "on one rank"}
    assert part in said(lambda: dbsp_diffusers.enable(pipe, {"mask": MASKS["dense"]}, **options))
    assert fingerprint(pipe.transformer) == before


@pytest.mark.parametrize(
    ("name", "world"),
    [*((name, 3 if name == "odd" else 2) for name in REJECTED), ("on one rank", 4)],
)
def test_enable_rejects_on_all_ranks(threads, name, world):
    threads(world).run(rejected_by_enable, name)


def rejected_in_a_pass(rank: int, world: int, name: str) -> str:
    """Returns what a call says that two halves cannot share."""
    guided = Guided("CogVideoXPipeline" if name == "cache" else "WanPipeline", cache=1.0 if name == "cache" else None)
    pipe = guided.pipe()
    dbsp_diffusers.enable(pipe, guided.config, guidance=True)
    if name == "gradients":
        return said(lambda: pipe.transformer(**tiny_inputs("wan")))
    return said(lambda: guided.made(pipe))


@pytest.mark.parametrize(("name", "part"), [("gradients", "torch.no_grad()"), ("cache", "FBC")])
def test_passes_that_halves_cannot_share_are_rejected(threads, name, part):
    for answer in threads(2).run(rejected_in_a_pass, name):
        assert part in answer


def failing_in_one_half(rank: int, world: int) -> None:
    """Makes a call whose mask fails in the second half, and one that must be right."""
    guided = Guided(strategy="U1R2")
    _, expected = in_one_process(guided)
    pipe = guided.pipe()
    session = dbsp_diffusers.enable(pipe, guided.config, guidance=True)
    no_mask = mock.patch.object(session, "attend", side_effect=UserError("no mask"))
    with no_mask if rank >= world // 2 else nullcontext():
        assert "rank(s) [2, 3]: no mask" in said(lambda: guided.made(pipe))
    assert_near(guided.made(pipe), expected)


def test_error_in_one_half_is_raised_in_both(threads):
    threads(4).run(failing_in_one_half)


def test_halves_on_processes(pool):
    pool(4).run(run_guided, Guided(strategy="U1R2"))
    pool(4).run(failing_in_one_half)

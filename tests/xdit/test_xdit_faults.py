"""dbsp_xdit and what does not work: one clear line on every rank, and a pipe that goes on."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from tests.support.models.tiny_transformers import make_tiny_transformer, tiny_inputs
from tests.support.outcomes import assert_near, outputs, said
from tests.xdit.xdit_cases import PipelineCase, cogvideox_alone, in_xfusers_class

BY_STEP = {"source": "callable", "function": "tests.support.user_masks:band", "depends_on": "step"}
BY_STEP |= {"block_q": 8, "block_k": 8}


def _unknown_of_xfuser() -> Any:
    stock = type("StrangeTransformer3DModel", (nn.Identity,), {"__module__": "diffusers.strange"})
    return type("xFuserStrangeTransformer3DWrapper", (stock,), {"__module__": "xfuser.strange"})()


def _cached_before() -> Any:
    transformer = in_xfusers_class("wan")
    transformer.forward = functools.partial(transformer.forward)  # as cache-dit does
    return transformer


TRANSFORMERS = {
    "unknown of xfuser": _unknown_of_xfuser,
    "cached before": _cached_before,
    "wrapper": lambda: in_xfusers_class("wan"),
    "cogvideox": lambda: make_tiny_transformer("cogvideox"),
}


def attach_error(rank: int, world: int, kind: str, config: dict[str, Any]) -> str:
    from dbsp_xdit import attach

    return said(lambda: attach(SimpleNamespace(transformer=TRANSFORMERS[kind]()), config))


@pytest.mark.parametrize(
    ("kind", "config", "guidance", "expected"),
    [
        ("unknown of xfuser", {}, 1, "does not know xFuserStrangeTransformer3DWrapper"),
        ("cached before", {}, 1, "attach db-SP before step caches"),
        ("wrapper", {"strategy": "U3R1"}, 1, "strategy U3R1 needs 3 GPUs"),
        ("wrapper", {}, 2, "use_cfg_parallel: SimpleNamespace does not run the two CFG passes"),
        ("cogvideox", {}, 2, "use_cfg_parallel: SimpleNamespace does not run the two CFG passes"),
    ],
)
def test_attach_is_rejected_on_all_ranks(xfuser, kind, config, guidance, expected):
    answers = xfuser(2, guidance).run(attach_error, kind, config)
    assert answers[0] == answers[1]
    assert answers[0].startswith("UserError: ")
    assert expected in answers[0]
    assert "\n" not in answers[0]


def run_until_error(rank: int, world: int) -> None:
    """Runs a pass whose mask cannot be made on any rank, and then one with dense masks."""
    from dbsp_xdit import attach, detach

    pipe, inputs = SimpleNamespace(transformer=in_xfusers_class("wan")), tiny_inputs("wan")
    with torch.no_grad():
        attach(pipe, {"mask": {"source": "callable", "function": "tests.support.user_masks:transposed"}})
        answer = said(lambda: pipe.transformer(**inputs))
        assert answer.startswith("UserError: "), answer
        assert "tests.support.user_masks:transposed" in answer, answer
        detach(pipe)
        attach(pipe, {})
        assert_near(outputs(pipe.transformer, inputs), outputs(make_tiny_transformer("wan"), inputs))
        detach(pipe)


def test_transformer_after_a_failed_pass_equals_one_process(xfuser):
    xfuser(2).run(run_until_error)


def kept_forward(rank: int, world: int) -> None:
    """Calls a forward that a library keeps from before `detach`: the transformer's own, which is gone."""
    from dbsp_xdit import attach, detach

    pipe = SimpleNamespace(transformer=in_xfusers_class("wan"))
    attach(pipe, {})
    kept = pipe.transformer.forward
    detach(pipe)
    cls: Any = type(pipe.transformer)
    with mock.patch.object(cls, "forward", return_value="own"):
        assert kept() == "own"
    assert "forward" not in vars(pipe.transformer)


def test_cache_that_outlives_detach_calls_xfusers_own_forward(xfuser):
    xfuser(2).run(kept_forward)


class _Broken(Exception):
    """A failure in a generation."""


def fail_then_generate(rank: int, world: int, case: PipelineCase) -> None:
    """Lets a generation of another size fail after a step, and then makes one."""
    from dbsp_xdit import attach, detach

    def break_off(*_: Any) -> Any:
        raise _Broken

    pipe = case.pipe(world)
    attach(pipe, case.config)
    hook = pipe.transformer.transformer_blocks[1].ff.register_forward_hook(break_off)
    with pytest.raises(_Broken):
        case.latents(pipe, num_frames=17)
    hook.remove()
    assert_near(case.latents(pipe), *cogvideox_alone(case)[::-1])
    detach(pipe)


def test_generation_after_a_failed_one_equals_one_process(xfuser, tiny):
    """Its masks are by step: a step counted on from the one that failed would have another."""
    xfuser(2).run(fail_then_generate, PipelineCase(tiny, {"mask": BY_STEP, "strategy": "U1R2"}, height=64))

"""Rejections of dbsp_xdit: one clear line on every rank; and a forward that outlives `detach`."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from torch import nn

from dbsp_xdit import attach, detach
from tests.support.outcomes import said
from tests.xdit.xdit_cases import in_xfusers_class


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
}


def attach_error(rank: int, world: int, kind: str, config: dict[str, Any]) -> str:
    return said(lambda: attach(SimpleNamespace(transformer=TRANSFORMERS[kind]()), config))


@pytest.mark.parametrize(
    ("kind", "config", "guidance", "expected"),
    [
        ("unknown of xfuser", {}, 1, "does not know xFuserStrangeTransformer3DWrapper"),
        ("cached before", {}, 1, "attach db-SP before step caches"),
        ("wrapper", {}, 2, "use_cfg_parallel: SimpleNamespace does not run the two CFG passes"),
    ],
)
def test_attach_is_rejected_on_all_ranks(xfuser, kind, config, guidance, expected):
    answers = xfuser(2, guidance).run(attach_error, kind, config)
    assert answers[0] == answers[1]
    assert answers[0].startswith("UserError: ")
    assert expected in answers[0]
    assert "\n" not in answers[0]


def kept_forward(rank: int, world: int) -> None:
    """Calls a forward that a library keeps from before `detach`: the transformer's own, which is gone."""
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

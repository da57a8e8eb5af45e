"""Sparse-Linear Attention: mask and linear branch written out, and the same on ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from dbsp_core import SequenceGroup, Strategy
from dbsp_core.config import DbspConfig
from dbsp_core.masks.branches import LinearBranch
from dbsp_core.masks.grid import Video
from dbsp_core.runtime.session import AttentionSession
from dbsp_core.sources import LocalQK, SlaSource, sla
from dbsp_core.utils.errors import UserError
from tests.core.sources.predicted.sparge_cases import SpargeCase
from tests.support.oracle import largest_difference
from tests.support.single_process import masked_attention


@dataclass(frozen=True)
class SlaCase(SpargeCase):
    heads: int = 3
    kind: type[Any] = SlaSource


CASES = {
    "softmax": SlaCase(settings={"topk": 0.3}),
    "elu, text, batch of two": SlaCase(text_tokens=21, batch=2, settings={"topk": 0.2, "feature": "elu"}),
    "relu, float64": SlaCase(thw=(4, 7, 6), dtype=torch.float64, settings={"topk": 0.5, "feature": "relu"}),
}
MAPS = {
    "softmax": lambda x: np.exp(x) / np.exp(x).sum(-1, keepdims=True),
    "elu": lambda x: np.where(x > 0, x + 1, np.exp(np.minimum(x, 0))),
    "relu": lambda x: np.maximum(x, 0),
}


def projection_and_values(case: SpargeCase) -> tuple[torch.nn.Linear, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    q, _ = case.tensors()
    layer = torch.nn.utils.skip_init(torch.nn.Linear, case.head_dim, case.head_dim, dtype=case.dtype)
    layer.load_state_dict(
        {name: torch.randn(part.shape, generator=generator) for name, part in layer.state_dict().items()}
    )
    return layer.requires_grad_(False), torch.randn(q.shape, generator=generator).to(case.dtype)


def units(layer: torch.nn.Linear) -> torch.Tensor:
    """Returns the projection's outputs of zeros and of each channel, [D + 1, D]."""
    return torch.cat([layer.bias[None], layer.weight.T + layer.bias])


def written_out(case: SpargeCase) -> tuple[np.ndarray, np.ndarray]:
    """Returns bool[B · H, nq, nk], and the linear branch of every token, float64[B · H, tokens, D]."""
    q, k = case.by_head()
    layer, v = projection_and_values(case)
    grid, feature = case.source.grid(case.request), MAPS[case.settings.get("feature", "softmax")]
    q_means, k_means = (
        np.stack([tokens[:, a : a + n].mean(1) for a, n in zip(axis.starts, axis.lengths, strict=True)], axis=1)
        for tokens, axis in ((q, grid.q_axis), (k - k.mean(1, keepdims=True), grid.k_axis))
    )
    scores, count = q_means @ k_means.swapaxes(1, 2), max(1, int(case.settings["topk"] * grid.nk))
    bits = np.zeros(scores.shape, dtype=bool)
    np.put_along_axis(bits, np.argsort(-scores, axis=-1, kind="stable")[..., :count], True, axis=-1)
    bits[:, grid.q_axis.starts < case.text_tokens] = True
    bits[:, :, grid.k_axis.starts < case.text_tokens] = True
    phi_q, phi_k, values = feature(q), feature(k), v.double().flatten(0, 1).numpy()
    below = 1e-5 + phi_q @ phi_k.sum(1)[..., None]
    linear = phi_q @ (phi_k.swapaxes(1, 2) @ values) / below
    return bits, linear @ layer.weight.double().numpy().T + layer.bias.double().numpy()


def alone(case: SpargeCase) -> Any:
    layer, v = projection_and_values(case)
    return case.source.mask(case.request, LocalQK.alone(*case.tensors(), v=v, gate=units(layer)))


def branch_of(branch: LinearBranch, like: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(like)
    branch.add_to(out)
    return out.flatten(0, 1)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_follows_its_definition(case):
    bits, linear = written_out(case)
    mask = alone(case)
    assert np.array_equal(mask.bits.numpy(), bits)
    error = np.abs(branch_of(mask.branch, case.tensors()[0]).numpy() - linear).max()
    assert error < (1e-12 if case.dtype == torch.float64 else 1e-5)


def error_of(rank: int, world: int, case: SpargeCase, strategy: str) -> float:
    """Returns how far a session's output is from one process's."""
    group, (layer, v) = SequenceGroup.from_group(), projection_and_values(case)
    session = AttentionSession(DbspConfig(mask=case.source), group, Strategy.parse(strategy), case.heads, 1)
    layout = session.begin(Video(case.thw, case.text_tokens), timestep=900.0)
    q, k = case.tensors()
    mine, positions = layout.tokens_at(rank)
    local = torch.full((3, case.batch, case.heads, layout.shard, case.head_dim), torch.nan, dtype=case.dtype)
    local[..., positions, :] = torch.stack([q, k, v])[..., mine, :]
    with torch.no_grad():
        out = session.attend(0, *local.nan_to_num(1e3), gate=units(layer))[..., positions, :]
    whole = masked_attention(q, k, v, alone(case))
    return largest_difference(out, whole[..., mine, :])


@pytest.mark.parametrize(("world", "strategy"), [(2, "U2R1"), (3, "U1R3"), (4, "U2R2")])
def test_session_equals_one_process(threads, world, strategy):
    case = list(CASES.values())[world % 3]
    assert max(threads(world).run(error_of, replace(case, heads=5), strategy)) < 1e-5


def test_without_a_projection_the_mask_is_left_and_it_is_said_once(caplog):
    case = CASES["softmax"]
    sla._say_without_projection.cache_clear()
    for _ in range(2):
        assert case.source.mask(case.request, LocalQK.alone(*case.tensors(), v=case.tensors()[0])).branch is None
    assert caplog.text.count("no projection (attn1.proj_l) found") == 1
    mask_alone = replace(case.source, linear=False)
    assert mask_alone.branch_layer is None
    tokens = LocalQK.alone(*case.tensors(), v=case.tensors()[0], gate=units(projection_and_values(case)[0]))
    assert mask_alone.mask(case.request, tokens).branch is None


def test_mistakes_are_rejected():
    case = CASES["softmax"]
    q, k = case.tensors()
    with pytest.raises(UserError, match=r"of shape \[16, 16\], expected \[17, 16\] for heads of 16 channels"):
        case.source.mask(case.request, LocalQK.alone(q, k, v=q, gate=torch.eye(16)))
    session = AttentionSession(DbspConfig(mask=case.source), SequenceGroup(0, 1), Strategy(1, 1), case.heads, 1)
    session.begin(Video(case.thw))
    with pytest.raises(UserError, match="a linear branch does not support gradients; set linear"):
        session.attend(0, q.requires_grad_(), k, k, gate=units(projection_and_values(case)[0]))

"""Sessions of engines that shard the sequence themselves: whole text next to it, what is before and after the video,
padding anywhere at the end; against torch's own attention in one process."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
import yaml

from dbsp_core import SequenceGroup
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.grid import Video
from dbsp_core.masks.steps import StepClock
from dbsp_core.runtime.engine_session import EngineLayout, EngineSession
from dbsp_core.sources import LocalQK, MaskRequest, VsaSource
from dbsp_core.utils.errors import UserError
from scripts.checks.engines.reference import attend_under
from tests.support.oracle import largest_difference
from tests.support.shared import shared
from tests.support.single_process import masked_attention
from tests.support.thread_ranks import ThreadRanks

KNOWN = "synthetic:density=0.4,block_q=16,block_k=8"
PREDICTED = "sparge:cdf=0.4,similarity=-1,block_q=16,block_k=8"
THW, HEADS, LAYERS, WIDTH = (3, 5, 5), 3, 2, 8
LAYOUTS = {
    "video": EngineLayout(THW),
    "text in the sequence": EngineLayout(THW, before=7, after=4),
    "padding on several ranks": EngineLayout(THW, before=7, shard=64),
    "whole text first": EngineLayout(THW, text=7),
    "whole text last": EngineLayout(THW, text=7, text_last=True),
    "whole text and others": EngineLayout(THW, before=3, after=2, shard=60, text=9, text_last=True),
}
PADDING = 3
"""Slots of whole text that hold padding."""


def tensors(layout: EngineLayout, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns q, k and v [3, 2, tokens, H, D] of the whole text, padding included, and of the sequence."""
    generator = torch.Generator().manual_seed(layer)
    others = layout.before + layout.after
    counts = layout.text + PADDING, others + layout.video.grid_tokens
    return tuple(torch.randn(3, 2, count, HEADS, WIDTH, generator=generator) for count in counts)


@shared
def reference(layout: EngineLayout, mask: str, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs of text and sequence in one process."""
    text, sequence = tensors(layout, layer)
    first, last = layout.before, layout.before + layout.video.grid_tokens
    parts = text[:, :, : layout.text], sequence[:, :, :first], sequence[:, :, last:], sequence[:, :, first:last]
    out = attend_under(mask, layer, LAYERS, THW, *torch.cat(parts, dim=2), text=layout.video.text)
    whole, before, after, video = out.split([part.shape[2] for part in parts], dim=1)
    return F.pad(whole, (0, 0, 0, 0, 0, PADDING)), torch.cat([before, video, after], dim=1)


def error_of(rank: int, world: int, name: str, mask: str, strategy: str) -> float:
    layout = LAYOUTS[name]
    session = EngineSession(SequenceGroup.from_group(), Strategy.parse(strategy), HEADS, LAYERS, mask)
    with_text = layout.text > 0
    worst = 0.0
    for step in range(2):
        session.begin(layout, "cpu", step)
        for layer in range(LAYERS):
            text, sequence = tensors(layout, layer)
            shard = layout.shard or -(-sequence.shape[2] // world)
            padded = F.pad(sequence, (0, 0, 0, 0, 0, world * shard - sequence.shape[2]), value=1e4)
            own = padded[:, :, rank * shard : (rank + 1) * shard]
            out = session.attend(layer, *own, None, tuple(text) if with_text else None)
            slots = text.shape[2] if with_text else 0
            of_text, of_shard = (out[:, shard:], out[:, :shard]) if layout.text_last else out.split((slots, shard), 1)
            gathered = torch.cat(SequenceGroup.from_group().all_gather(of_shard), dim=1)[:, : sequence.shape[2]]
            expected = reference(layout, mask, layer)
            worst = max(worst, largest_difference(gathered, expected[1]))
            if with_text:
                everyone = SequenceGroup.from_group().all_gather(of_text)
                assert all(torch.equal(one, everyone[0]) for one in everyone), "the same text on all ranks"
                worst = max(worst, largest_difference(of_text, expected[0]))
    return worst


@pytest.mark.parametrize(
    ("name", "mask", "strategy"),
    [
        *((name, KNOWN, "U2R2") for name in LAYOUTS),
        *(("whole text and others", mask, "U1R3") for mask in (KNOWN, PREDICTED)),
        ("whole text first", PREDICTED, "U2R1"),
        ("padding on several ranks", PREDICTED, "U2R2"),
    ],
)
def test_session_of_an_engine_equals_one_process(name, mask, strategy):
    assert max(ThreadRanks(Strategy.parse(strategy).world).run(error_of, name, mask, strategy)) <= 1e-5


def error_of_parts(rank: int, world: int, last: bool, shares: tuple[int, ...], strategy: str) -> float:
    """Each rank has its own part of the text before or after its shard, and no slots for what it lacks."""
    layout = EngineLayout(THW, shard=-(-75 // world), text=sum(shares), text_last=last, text_shares=shares)
    session = EngineSession(SequenceGroup.from_group(), Strategy.parse(strategy), HEADS, LAYERS, PREDICTED)
    session.begin(layout, "cpu", 0)
    worst, group, first = 0.0, SequenceGroup.from_group(), sum(shares[:rank])
    for layer in range(LAYERS):
        generator = torch.Generator().manual_seed(layer)
        together = torch.randn(3, 2, sum(shares) + 75, HEADS, WIDTH, generator=generator)
        text, video = together.split([sum(shares), 75], dim=2)
        expected = attend_under(PREDICTED, layer, LAYERS, THW, *together, text=sum(shares))
        padded = F.pad(video, (0, 0, 0, 0, 0, world * layout.shard - 75), value=1e4)
        mine = text[:, :, first : first + shares[rank]], padded[:, :, rank * layout.shard : (rank + 1) * layout.shard]
        out = session.attend(layer, *torch.cat(mine[:: -1 if last else 1], dim=2))
        sizes = [shares[rank], layout.shard]
        of_text, of_video = out.split(sizes[:: -1 if last else 1], dim=1)[:: -1 if last else 1]
        gathered = torch.cat(group.all_gather(of_video), dim=1)[:, :75]
        worst = max(worst, largest_difference(gathered, expected[:, sum(shares) :]))
        if shares[rank]:
            worst = max(worst, largest_difference(of_text, expected[:, first : first + shares[rank]]))
    return worst


@pytest.mark.parametrize(
    ("last", "shares", "strategy"),
    [(False, (2, 2, 2, 1), "U2R2"), (True, (3, 3, 1, 0), "U2R2"), (True, (4, 3), "U1R2")],
)
def test_text_in_parts_equals_one_process(last, shares, strategy):
    assert max(ThreadRanks(Strategy.parse(strategy).world).run(error_of_parts, last, shares, strategy)) <= 1e-5


ALONE = SequenceGroup(0, 1), Strategy(1, 1), HEADS, LAYERS
UNION = {"mask": {"source": "union", "of": [KNOWN, PREDICTED]}}


@pytest.mark.parametrize("mask", [KNOWN, UNION], ids=["known", "union"])
def test_heads_of_tensor_parallelism_have_masks_of_their_own(mask, tmp_path):
    """Each of two tensor-parallel ranks has half of 6 heads, whose masks differ."""
    generator, file = torch.Generator().manual_seed(0), tmp_path / "mask.yaml"
    file.write_text(yaml.safe_dump(mask if isinstance(mask, dict) else {"mask": mask}), encoding="utf-8")
    q, k, v = torch.randn(3, 1, 75, 6, WIDTH, generator=generator)
    expected = attend_under(str(file), 1, LAYERS, THW, q, k, v)
    for first in (0, 3):
        session = EngineSession(*ALONE, str(file), head_slice=(first, 6))
        session.begin(EngineLayout(THW), "cpu", 0)
        out = session.attend(1, *(tensor[:, :, first : first + 3] for tensor in (q, k, v)))
        assert largest_difference(out, expected[:, :, first : first + 3]) <= 1e-5


VSA = VsaSource(64, 64, sparsity=0.7)
H3, H3_SLOTS, H3_HEADS = EngineLayout((6, 9, 5), before=20, runs=(7, 8, 5)), 320, 56
"""As MiniMax-H3 has it: text, audio and a reference in one sequence with the video, and padding after it."""


@shared
def of_h3() -> tuple[torch.Tensor, torch.Tensor]:
    """Returns q, k, v and gate, [4, 1, tokens, heads, D], and the output of one process."""
    everywhere = torch.randn(4, 1, H3.video.tokens, H3_HEADS, WIDTH, generator=torch.Generator().manual_seed(5))
    q, k, v, gate = everywhere.transpose(2, 3)
    request = MaskRequest(0, H3_HEADS, H3.thw, H3.before, layers=1, text_runs=H3.runs)
    mask = VSA.mask(request, LocalQK.alone(q, k, v=v, gate=gate))
    assert mask.bits.float().mean() < 0.8, "blocks are skipped"
    return everywhere, masked_attention(q, k, v, mask).transpose(1, 2)


def error_of_h3(rank: int, world: int) -> float:
    group, shard, (everywhere, expected) = SequenceGroup.from_group(), H3_SLOTS // world, of_h3()
    session = EngineSession(group, Strategy(world, 1), H3_HEADS, 1, VSA)
    session.begin(replace(H3, shard=shard), "cpu", step=0)
    padded = F.pad(everywhere, (0, 0, 0, 0, 0, H3_SLOTS - everywhere.shape[2]), value=1e4)
    q, k, v, gate = padded[:, :, rank * shard : (rank + 1) * shard]
    out = torch.cat(group.all_gather(session.attend(0, q, k, v, gate=gate)), dim=1)[:, : everywhere.shape[2]]
    return largest_difference(out, expected)


def test_vsa_of_minimax_h3_with_heads_that_do_not_divide_equals_one_process():
    """Covers vLLM-Omni #7589, with its 56 heads on 16 ranks: text, audio, video, coarse branch, gate."""
    assert max(ThreadRanks(16).run(error_of_h3)) < 1e-5


BY_STEP = {"mask": {"source": "synthetic", "density": 0.4}, "dense_schedule": {"first_steps": 3}}


def test_one_rank_with_text_in_its_sequence_equals_one_process():
    session = EngineSession(*ALONE, KNOWN)  # of both: a video of one size in two layouts
    for name in ("whole text first", "whole text last"):
        layout = LAYOUTS[name]
        session.begin(layout, "cpu", step=0)
        text, sequence = tensors(layout, 0)
        joined = torch.cat([sequence, text] if layout.text_last else [text, sequence], dim=2)
        whole, expected = reference(layout, KNOWN, 0)
        expected = torch.cat([expected, whole] if layout.text_last else [whole, expected], dim=1)
        assert (session.attend(0, *joined) - expected).abs().max() <= 1e-5


def test_sequence_that_its_ranks_cannot_hold_is_rejected():
    with pytest.raises(UserError, match="2 ranks of 20 tokens for a sequence of 75"):
        EngineLayout(THW, shard=20).on(2)


def test_steps_are_counted_across_transformers_and_skipped_steps():
    clock = StepClock(shared=True)
    sessions = [EngineSession(*ALONE, BY_STEP, clock=clock) for _ in range(2)]
    seen = []
    for which, step in ((0, 0), (0, 1), (0, 1), (1, 3), (1, 5), (0, 0), (1, 3)):
        sessions[which].begin(Video(THW), "cpu", step)
        seen.append(sessions[which].session._provider.moment)
    assert [(one.step, one.cfg_branch) for one in seen] == [(0, 0), (1, 0), (1, 1), (3, 0), (5, 0), (0, 0), (3, 0)]


def test_each_request_begins_a_generation():
    session, seen = EngineSession(*ALONE, BY_STEP), []
    for request, step in (("first", 0), ("second", 0), ("second", 0), ("second", 1)):  # the first one was given up
        session.begin(Video(THW), "cpu", step, generation=request)
        seen.append(session.session._provider.moment)
    first = seen[0].generation
    assert [(moment.generation - first, moment.step, moment.cfg_branch) for moment in seen] == [
        *((0, 0, 0), (1, 0, 0), (1, 0, 1), (1, 1, 0)),
    ]


def test_second_transformer_is_dense_in_the_videos_last_steps_alone():
    settings = {"mask": KNOWN, "dense_schedule": {"first_steps": 1, "last_steps": 2}}
    sessions = [EngineSession(*ALONE, settings, transformer=name) for name in ("transformer", "transformer_2")]
    q, dense = torch.randn(1, 75, HEADS, WIDTH), []
    for step in range(6):
        session = sessions[step >= 3]
        before = session.session.reuse.dense
        session.begin(Video(THW), "cpu", step, 0, steps=6)
        session.attend(0, q, q, q)
        dense += [step] if session.session.reuse.dense > before else []
    assert dense == [0, 4, 5]


@pytest.mark.parametrize("config", [BY_STEP, {"mask": "sol:tau=[0.5,1.0]"}], ids=["schedule", "setting"])
def test_masks_by_step_without_a_step_of_the_engine_are_rejected(config):
    session = EngineSession(*ALONE, config)
    session.begin(Video(THW), "cpu", timestep=900.0)
    with pytest.raises(UserError, match="depend on the denoising step, which the engine does not provide"):
        session.begin(Video(THW), "cpu")

"""scripts/train_tiny on toy settings: it resumes to the same state, and what it computes is what inference does."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from rich.progress import Progress

from tests.support.programs import output_of

pytest.importorskip("diffusers")
from scripts.training import autoencoder, flow, loop, text

pytestmark = pytest.mark.long


class Stopped(RuntimeError):
    """Interruption of a run."""


def stopping(function, after: int | None):
    """Returns the function, which raises at its call number `after`."""
    calls = iter(range(1 << 30))

    def once(*args):
        if next(calls) == after:
            raise Stopped
        return function(*args)

    return once


def train_autoencoder(folder: Path, stop: int | None, steps: int = 4):
    torch.manual_seed(1)
    vae = autoencoder.make_autoencoder(2)
    clips = [autoencoder.Clips(steps, 1, 5, 16, 16)]
    with pytest.MonkeyPatch.context() as patched, Progress(disable=True) as progress:
        patched.setattr(autoencoder, "_clips", stopping(autoencoder._clips, stop))
        losses = autoencoder.train_autoencoder(vae, "vae", clips, 1e-3, 5, folder, progress)
    return vae.state_dict(), losses


def train_transformer(folder: Path, stop: int | None, steps: int = 4):
    torch.manual_seed(1)
    transformer = flow.make_transformer(8, 1)
    videos = flow.Videos(torch.randn(3, 16, 3, 4, 6), torch.randn(3, 8, 64), torch.zeros(8, 64))
    phases = [flow.Phase(min(2, steps), 2, 2), flow.Phase(max(steps - 2, 0), 1, 3)]
    with pytest.MonkeyPatch.context() as patched, Progress(disable=True) as progress:
        patched.setattr(flow, "_loss", stopping(flow._loss, stop))
        average, losses = flow.train_transformer(transformer, videos, phases, 1e-3, 5, folder, progress)
    return average.state_dict(), losses


@pytest.mark.parametrize("train", [train_autoencoder, train_transformer])
def test_a_run_that_was_stopped_goes_on_to_the_same_weights(tmp_path, monkeypatch, train):
    """Stops one of two runs after three of four steps."""
    whole, cut, new = (tmp_path / name for name in ("whole", "cut", "new"))
    for folder in (whole, cut, new):
        folder.mkdir()
    weights, losses = train(whole, None)
    with monkeypatch.context() as patched:
        patched.setattr(loop, "SAVE_EVERY", 2)
        with pytest.raises(Stopped):
            train(cut, 3)
    again, losses_again = train(cut, None)
    assert all(torch.equal(a, b) for a, b in zip(weights.values(), again.values(), strict=True))
    assert losses == losses_again
    assert all(map(math.isfinite, losses))
    begun, _ = train(new, 0, steps=0)
    assert any(not torch.equal(a, b) for a, b in zip(weights.values(), begun.values(), strict=True)), "it learned"


@torch.no_grad()
def test_captions_with_few_pads_are_attended_as_with_all():
    """Compares attention to 16 tokens, one pad for all the rest, with WanPipeline's 512; and without its weight."""
    torch.manual_seed(0)
    block = flow.make_transformer(8, 1).blocks[0]
    hidden, words = torch.randn(2, 5, 96), torch.randn(2, 9, 96)
    pad = torch.randn(96)
    short, full = (torch.cat([words, pad.expand(2, size - 9, 96)], 1) for size in (16, text.PADDED))
    expected = block.attn2(hidden, full)
    found = flow.FewPads(block.attn2.processor)(block.attn2, hidden, short)
    assert (found - expected).abs().max() <= 1e-4
    assert (block.attn2(hidden, short) - expected).abs().max() > 1e-2, "the pads must matter for this to be a test"


def test_attention_written_out_is_attention(monkeypatch):
    """Takes a mask that is added, for one head and for all, in several pieces."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, size, 8) for size in (40, 50, 50))
    mask = torch.randn(1, 1, 40, 50)
    monkeypatch.setattr(flow, "_TOGETHER", 4000)
    for one in (mask, mask.expand(2, 3, -1, -1)):
        error = flow.plain_attention(q, k, v, one) - F.scaled_dot_product_attention(q, k, v, one)
        assert error.abs().max() < 0.05  # bfloat16


def test_a_toy_run_makes_a_pipeline_and_runs_again(tmp_path):
    command = "scripts.training", "--toy", "--threads", 1
    folders = "--work", tmp_path / "work", "--weights", tmp_path / "weights"
    assert "transformer" in output_of(*command, *folders)
    weights = (tmp_path / "weights" / "transformer" / "diffusion_pytorch_model.safetensors").read_bytes()
    assert len((tmp_path / "weights" / "loss.csv").read_text().splitlines()) == 1 + 3 + 4
    output_of(*command, *folders)
    assert (tmp_path / "weights" / "transformer" / "diffusion_pytorch_model.safetensors").read_bytes() == weights

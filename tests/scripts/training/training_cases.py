"""Program on scripts/training's modules that prints its findings as a JSON object."""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.progress import Progress

from scripts.training import autoencoder, flow, loop, plain, text


class Stopped(RuntimeError):
    """The run was interrupted."""


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, Progress(disable=True) as progress:
        found = {
            "autoencoder": resumed(train_autoencoder, Path(folder) / "a", progress),
            "transformer": resumed(train_transformer, Path(folder) / "t", progress),
            "pads": few_pads_against_all(),
            "attention": plain_against_fused(),
        }
    print(json.dumps(found))


def resumed(train, folder: Path, progress: Progress) -> dict[str, object]:
    """Two runs, one of them stopped after three of four steps: whether weights and losses are bitwise identical."""
    whole, losses = train(folder / "whole", progress, None)
    before = loop.SAVE_EVERY
    loop.SAVE_EVERY = 2
    try:
        train(folder / "cut", progress, 3)
        raise AssertionError("the run was not stopped")
    except Stopped:
        pass
    finally:
        loop.SAVE_EVERY = before
    again, more = train(folder / "cut", progress, None)
    same = all(torch.equal(a, b) for a, b in zip(whole.values(), again.values(), strict=True))
    begun = train(folder / "new", progress, 0, steps=0)[0]
    learned = any(not torch.equal(a, b) for a, b in zip(whole.values(), begun.values(), strict=True))
    return {"same": same, "losses": losses == more, "finite": all(map(math.isfinite, losses)), "learned": learned}


def stopping(function, after: int | None):
    """The function, which raises at its call number `after`."""
    calls = iter(range(1 << 30))

    def once(*args):
        if next(calls) == after:
            raise Stopped
        return function(*args)

    return once


def train_autoencoder(folder: Path, progress: Progress, stop: int | None, steps: int = 4):
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(1)
    vae = autoencoder.make_autoencoder(2)
    clips = [autoencoder.Clips(steps, 1, 5, 16, 16)]
    cut, autoencoder._clips = autoencoder._clips, stopping(autoencoder._clips, stop)
    try:
        history = autoencoder.train_autoencoder(vae, "vae", clips, 1e-3, 5, folder, progress)
    finally:
        autoencoder._clips = cut
    return vae.state_dict(), history.losses


def train_transformer(folder: Path, progress: Progress, stop: int | None, steps: int = 4):
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(1)
    transformer = flow.make_transformer(8, 1)
    videos = flow.Videos(torch.randn(3, 16, 3, 4, 6), torch.randn(3, 8, 64), torch.zeros(8, 64))
    phases = [flow.Phase(min(2, steps), 2, 2), flow.Phase(max(steps - 2, 0), 1, 3)]
    loss, flow._loss = flow._loss, stopping(flow._loss, stop)
    try:
        average, history = flow.train_transformer(transformer, videos, phases, 1e-3, 5, folder, progress)
    finally:
        flow._loss = loss
    return average.state_dict(), history.losses


def few_pads_against_all() -> dict[str, float]:
    """Cross-attention on 16 tokens, one pad for all the rest, against WanPipeline's 512; and without its weight."""
    torch.manual_seed(0)
    block = flow.make_transformer(8, 1).blocks[0]
    hidden, words = torch.randn(2, 5, 96), torch.randn(2, 9, 96)
    pad = torch.randn(96)
    short, full = (torch.cat([words, pad.expand(2, size - 9, 96)], 1) for size in (16, text.PADDED))
    processor = block.attn2.processor
    with torch.no_grad():
        expected = block.attn2(hidden, full)
        ours = flow.FewPads(processor)(block.attn2, hidden, short)
        ignored = block.attn2(hidden, short)
    return {"error": float((ours - expected).abs().max()), "ignored": float((ignored - expected).abs().max())}


def plain_against_fused() -> float:
    """Largest difference, with a mask that is added and with one of bits, in several pieces."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, size, 8) for size in (40, 50, 50))
    mask = torch.randn(1, 1, 40, 50)
    plain._TOGETHER = 4000
    errors = [
        plain.plain_attention(q, k, v, one) - F.scaled_dot_product_attention(q, k, v, one)
        for one in (mask, mask > 0, (mask > 0).expand(2, 3, -1, -1))
    ]
    return float(torch.stack(errors).abs().max())


if __name__ == "__main__":
    main()

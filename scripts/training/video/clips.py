"""The training set: videos and captions, encoded once to latents and text embeddings, and the items of a step."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.progress import track
from safetensors.torch import load_file, save

from dbsp_core.utils.atomic_io import write_atomically
from dbsp_core.utils.errors import UserError
from scripts.training.video.settings import SYNTHETIC, Settings
from scripts.training.world import Scene, render

__all__ = ["Clips", "Item", "encode_clips"]

NO_CAPTION = "no-caption"


def encode_clips(settings: Settings) -> Path:
    """Encodes what is not encoded yet, one file a clip. returns: their folder, which is named after all it depends on

    Raises UserError for a folder without videos, a video without a caption, or one that is too short.
    """
    sources = list(_sources(settings))
    made_of = [str(settings.model.resolve()), settings.height, settings.width, settings.frames, *map(str, sources)]
    folder = settings.out / f"clips-{hashlib.blake2b(json.dumps(made_of).encode(), digest_size=6).hexdigest()}"
    missing = [number for number in range(len(sources)) if not _file(folder, number).is_file()]
    if not missing and (folder / f"{NO_CAPTION}.safetensors").is_file():
        return folder
    from diffusers import WanPipeline

    pipeline = WanPipeline.from_pretrained(
        settings.model, transformer=None, torch_dtype=torch.float32, local_files_only=True
    ).to("cuda" if torch.cuda.is_available() else "cpu")
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / f"{NO_CAPTION}.safetensors", save({"text": _text(pipeline, "")}))
    for number in track(missing, "encoding clips"):
        video, caption = _read(sources[number], settings)
        content = {"latents": _latents(pipeline.vae, video), "text": _text(pipeline, caption)}
        write_atomically(_file(folder, number), save(content))
    return folder


def _file(folder: Path, number: int) -> Path:
    return folder / f"{number:06d}.safetensors"


Source = Path | Scene


def _sources(settings: Settings) -> Iterator[Source]:
    kind, _, count = settings.data.partition(":")
    if kind == SYNTHETIC:
        if not count.isdecimal() or int(count) < 1:
            raise UserError(f"--data {settings.data}: write {SYNTHETIC}:COUNT with a count of at least 1")
        yield from (Scene.draw(settings.seed, index) for index in range(int(count)))
        return
    folder = Path(settings.data)
    videos = sorted(folder.glob("*.mp4"))
    if not videos:
        raise UserError(f"--data {folder} has no .mp4 files; give a folder of them, or {SYNTHETIC}:COUNT")
    without = [video.name for video in videos if not video.with_suffix(".txt").is_file()]
    if without:
        raise UserError(f"{len(without)} videos have no caption, {without[0]} first; write it to NAME.txt beside it")
    yield from videos


def _read(source: Source, settings: Settings) -> tuple[torch.Tensor, str]:
    """float32[3, F, H, W] in [−1, 1], and the caption."""
    if isinstance(source, Scene):
        video, caption = render(source, settings.frames), source.caption
    else:
        video, caption = (
            _read_mp4(source, settings.frames),
            source.with_suffix(".txt").read_text(encoding="utf-8").strip(),
        )
    return _fit(video, settings.height, settings.width), caption


def _read_mp4(path: Path, frames: int) -> torch.Tensor:
    import imageio.v3 as imageio

    try:
        pictures = [torch.from_numpy(frame) for _, frame in zip(range(frames), imageio.imiter(path), strict=False)]
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as a video: {error}") from error
    if len(pictures) < frames:
        raise UserError(f"{path} has {len(pictures)} frames, --frames asks for {frames}; choose fewer")
    return torch.stack(pictures).permute(3, 0, 1, 2).float() / 127.5 - 1


def _fit(video: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Scaled to cover height × width, and cut to its middle."""
    share = max(height / video.shape[2], width / video.shape[3])
    size = [round(video.shape[2] * share), round(video.shape[3] * share)]
    if size != list(video.shape[2:]):
        video = F.interpolate(video.transpose(0, 1), size=size, mode="bilinear", antialias=True).transpose(0, 1)
    top, left = (size[0] - height) // 2, (size[1] - width) // 2
    return video[:, :, top : top + height, left : left + width]


@torch.no_grad()
def _latents(vae: Any, video: torch.Tensor) -> torch.Tensor:
    """float16[C, f, h, w], standardised as WanPipeline's are."""
    latents = vae.encode(video[None].to(vae.device)).latent_dist.mode()
    mean, std = (
        torch.tensor(each, device=vae.device).view(-1, 1, 1, 1)
        for each in (vae.config.latents_mean, vae.config.latents_std)
    )
    return ((latents[0] - mean) / std).half().cpu()


@torch.no_grad()
def _text(pipeline: Any, caption: str) -> torch.Tensor:
    """float32[n, d], without the zeros at the end that it is padded with."""
    text, _ = pipeline.encode_prompt(caption, do_classifier_free_guidance=False)
    words = int(text[0].any(dim=1).nonzero().max()) + 1
    return text[0, :words].float().cpu().contiguous()


@dataclass(frozen=True)
class Item:
    """What one clip of a step is trained with. level: of the noise, in (0, 1]"""

    latents: torch.Tensor
    text: torch.Tensor
    noise: torch.Tensor
    level: float


@dataclass(frozen=True)
class Clips:
    """The encoded clips of a folder. shift: of noise levels; text_tokens: to which
    captions are padded, as WanPipeline does"""

    files: tuple[Path, ...]
    no_text: torch.Tensor
    no_caption: float
    seed: int
    shift: float
    text_tokens: int = 512

    @classmethod
    def read(cls, folder: Path, no_caption: float, seed: int, shift: float) -> Clips:
        no_text = load_file(folder / f"{NO_CAPTION}.safetensors")["text"]
        return cls(tuple(sorted(folder.glob("[0-9]*.safetensors"))), no_text, no_caption, seed, shift)

    @property
    def channels(self) -> int:
        """Of latents."""
        return int(load_file(self.files[0])["latents"].shape[0])

    def item(self, index: int) -> Item:
        """The index-th item of the run: all that is random depends on it and the seed alone, not on ranks."""
        draws = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        file = self.files[int(torch.randint(len(self.files), (1,), generator=draws))]
        without, even = torch.rand(2, generator=draws).tolist()
        content = load_file(file)
        latents = content["latents"].float()
        noise = torch.randn(latents.shape, generator=draws)
        text = self.no_text if without < self.no_caption else content["text"]
        text = F.pad(text[: self.text_tokens], (0, 0, 0, max(0, self.text_tokens - len(text))))
        return Item(latents, text, noise, self.shift * even / (1 + (self.shift - 1) * even))

"""What the workers of test_train_video run: a fine-tuning that is stopped, beside one that is not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import dbsp_diffusers
from scripts.training.video.clips import Clips
from scripts.training.video.fine_tuning import FineTuning
from scripts.training.video.mixed import cut_item, local_loss, sample_of
from scripts.training.video.settings import Settings
from tests.support.single_process import attach_single_process


def small(*more: object) -> Settings:
    """24 tokens of video."""
    sizes = ("--height", 48, "--width", 64, "--frames", 5, "--warm-up", 2)
    return Settings.parse([str(part) for part in (*sizes, *more)])


def stopped_and_not(
    rank: int, world: int, settings: Settings, folder: Path, steps: int
) -> tuple[list, list, list[str]]:
    """Losses of `steps` steps at once, and of as many in two runs, and the names of the weights' files."""
    mesh, clips = _setting(settings, folder)
    whole, halves = (replace(settings, out=settings.out / name) for name in ("whole", "halves"))
    if rank == 0:
        whole.out.mkdir(parents=True)
        halves.out.mkdir()
    dist.barrier()
    kept = _run(whole, mesh, clips, steps)
    _run(halves, mesh, clips, steps // 2)
    resumed = _run(halves, mesh, clips, steps)
    return kept, resumed, sorted(path.name for path in whole.out.rglob("*.safetensors"))


def go_on_from_another(rank: int, world: int, settings: Settings, folder: Path) -> None:
    """From the checkpoint of a run with LoRA."""
    mesh, clips = _setting(settings, folder)
    other = FineTuning.prepare(replace(settings, lora=2), mesh, clips, torch.device("cpu"))
    other.save()
    dbsp_diffusers.disable(other.transformer)
    FineTuning.prepare(settings, mesh, clips, torch.device("cpu"))


def steps_of(rank: int, world: int, settings: Settings, folder: Path, steps: int) -> list[float]:
    mesh, clips = _setting(settings, folder)
    return _run(settings, mesh, clips, steps)


def _setting(settings: Settings, folder: Path) -> tuple[DeviceMesh, Clips]:
    shape = (settings.data_parallel, settings.sequence_parallel)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "sequence"))
    return mesh, Clips.read(folder, settings.no_caption, settings.seed, shift=3.0)


def _run(settings: Settings, mesh: DeviceMesh, clips: Clips, steps: int) -> list[float]:
    training = FineTuning.prepare(settings, mesh, clips, torch.device("cpu"))
    while len(training.losses) < steps:
        training.step()
    training.save()
    training.save_weights()
    dbsp_diffusers.disable(training.transformer)
    return training.losses


def gradients_of_mix(rank: int, world: int, settings: Settings, folder: Path, step: int) -> float:
    """How far all gradients of a step of several sizes are from those of one process, which runs one sample after the
    other; as a share of the largest."""
    mesh, clips = _setting(settings, folder)
    training = FineTuning.prepare(settings, mesh, clips, torch.device("cpu"))
    transformer = training.transformer
    given = training.mix.step(step, settings.ranks)
    local_loss(transformer, clips, given, rank, torch.device("cpu")).backward()
    dbsp_diffusers.sum_gradients(transformer)
    dbsp_diffusers.disable(transformer)
    found = [p.grad.clone() for p in transformer.parameters()]

    transformer.zero_grad()
    single = attach_single_process(transformer, settings.config)
    values = 0
    for _, number, size in given:
        item = cut_item(clips, number, size)
        sample = sample_of(item, torch.device("cpu"))
        velocity = transformer(sample.latents[None], sample.timestep[None], sample.text[None], return_dict=False)[0]
        ((velocity[0] - item.noise + item.latents) ** 2).sum().backward()
        values += item.latents.numel()
    single.detach()
    expected = [p.grad / values for p in transformer.parameters()]
    largest = max(float(grad.abs().max()) for grad in expected)
    return max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True)) / largest

"""The training of one rank: the sharded transformer, an optimiser step, checkpoints, and the weights at the end."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import dbsp_diffusers
from dbsp_core.comm.auxiliary import meet
from dbsp_core.runtime.session.session import AttentionSession
from dbsp_core.utils.atomic_io import open_atomically
from dbsp_core.utils.errors import UserError
from scripts.training.video.clips import Clips
from scripts.training.video.mixed import Mix, local_loss
from scripts.training.video.settings import Settings

__all__ = ["FineTuning", "flow_loss"]

LORA_ON = ["to_q", "to_k", "to_v", "to_out.0"]


def flow_loss(model: Any, clips: Clips, indices: range, device: torch.device) -> torch.Tensor:
    """Mean squared error of the velocity, noise − latents, of the run's items `indices`, each at its own level."""
    items = [clips.item(index) for index in indices]
    clean, noise, text = (
        torch.stack([getattr(item, n) for item in items]).to(device) for n in ("latents", "noise", "text")
    )
    level = torch.tensor([item.level for item in items], device=device)
    mixed = torch.lerp(clean, noise, level.view(-1, 1, 1, 1, 1))
    velocity = model(hidden_states=mixed, timestep=level * 1000, encoder_hidden_states=text, return_dict=False)[0]
    return F.mse_loss(velocity.float(), noise - clean)


@dataclass
class FineTuning:
    """A transformer in training on this rank, and what it needs.

    model: what is called, which averages gradients over the data-parallel groups; mesh: ranks by (data, sequence)
    losses: of the steps so far, alike on all ranks
    mix: of several sizes; None: each step has clips of one size
    """

    settings: Settings
    transformer: Any
    model: Any
    session: AttentionSession
    optimizer: torch.optim.Optimizer
    mesh: DeviceMesh
    clips: Clips
    losses: list[float]
    mix: Mix | None = None

    @classmethod
    def prepare(cls, settings: Settings, mesh: DeviceMesh, clips: Clips, device: torch.device) -> FineTuning:
        """The same weights on all ranks, from the model's folder or the last checkpoint. Collective."""
        from diffusers import WanTransformer3DModel

        transformer = WanTransformer3DModel.from_pretrained(
            settings.model / "transformer", torch_dtype=torch.float32, local_files_only=True
        ).to(device)
        transformer.train()
        if settings.lora:
            from peft import LoraConfig

            torch.manual_seed(settings.seed)  # adapters are alike on all ranks
            transformer.requires_grad_(False)
            transformer.add_adapter(LoraConfig(r=settings.lora, lora_alpha=settings.lora, target_modules=LORA_ON))
        if settings.checkpointing:
            transformer.enable_gradient_checkpointing()
        if settings.fsdp:
            everyone = init_device_mesh(device.type, (settings.ranks,), mesh_dim_names=("everyone",))
            for block in transformer.blocks:
                fully_shard(block, mesh=everyone)
            fully_shard(transformer, mesh=everyone)
        sequence = mesh["sequence"].get_group()
        session = dbsp_diffusers.enable(transformer, settings.config, group=sequence)
        model = transformer
        if settings.data_parallel > 1 and not settings.fsdp:
            model = DistributedDataParallel(transformer, process_group=mesh["data"].get_group())
        parameters = [p for p in transformer.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=settings.learning_rate, weight_decay=0.01)
        mix = Mix.parse(settings.mix, settings.size) if settings.mix else None
        if mix is not None:
            mix.require_groups(settings.ranks, settings.data_parallel)
        training = cls(settings, transformer, model, session, optimizer, mesh, clips, [], mix)
        training._restore()
        return training

    def step(self) -> float:
        """One optimiser step. Returns the loss over the whole batch. Collective."""
        settings, device = self.settings, self.transformer.device
        mine = settings.batch // settings.data_parallel
        first = len(self.losses) * settings.batch + self.mesh["data"].get_local_rank() * mine
        for group in self.optimizer.param_groups:
            group["lr"] = settings.learning_rate * min(1.0, (len(self.losses) + 1) / max(1, settings.warm_up))
        self.optimizer.zero_grad()
        half = partial(torch.autocast, device.type, torch.bfloat16)
        with half() if settings.precision == "bf16" else contextlib.nullcontext():
            if self.mix is None:
                loss = flow_loss(self.model, self.clips, range(first, first + mine), device)
            else:  # averaged over data-parallel groups, of which each has a part of the sum
                given = self.mix.step(len(self.losses), settings.ranks)
                loss = local_loss(self.model, self.clips, given, dist.get_rank(), device, settings.bag_settings)
                loss = loss * settings.data_parallel
        loss.backward()
        dbsp_diffusers.sum_gradients(self.transformer)
        torch.nn.utils.clip_grad_norm_(self.transformer.parameters(), 1.0)
        self.optimizer.step()
        total = loss.detach()
        dist.all_reduce(total, group=self.mesh["data"].get_group() if self.mix is None else None)
        self.losses.append(float(total) / settings.data_parallel)
        return self.losses[-1]

    @property
    def _checkpoint(self) -> Path:
        return self.settings.out / "checkpoint.pt"

    @property
    def _marks(self) -> dict[str, Any]:
        """What a checkpoint cannot be continued with otherwise."""
        names = ("lora", "batch", "seed", "height", "width", "frames", "mix")
        return {name: getattr(self.settings, name) for name in names}

    def save(self) -> None:
        """Writes the checkpoint and loss.csv, whole or not at all. Collective."""
        model, optimizer = get_state_dict(self.transformer, self.optimizer, options=_options(cpu_offload=True))
        if dist.get_rank() == 0:
            content = {"model": model, "optimizer": optimizer, "losses": self.losses, "marks": self._marks}
            with open_atomically(self._checkpoint) as file:
                torch.save(content, file)
            rows = [f"{step},{loss:.9g}\n" for step, loss in enumerate(self.losses)]
            (self.settings.out / "loss.csv").write_text("step,loss\n" + "".join(rows), encoding="utf-8")
        meet()

    def _restore(self) -> None:
        if not self._checkpoint.is_file():
            return
        content = torch.load(self._checkpoint, weights_only=True, map_location="cpu")
        odd = [name for name, value in self._marks.items() if content["marks"][name] != value]
        if odd:
            then = ", ".join(f"{name}={content['marks'][name]}" for name in odd)
            raise UserError(f"{self._checkpoint} was made with {then}; give the same, or another --out")
        set_state_dict(
            self.transformer,
            self.optimizer,
            model_state_dict=content["model"],
            optim_state_dict=content["optimizer"],
            options=_options(strict=False),
        )
        self.losses = content["losses"]

    def save_weights(self) -> Path:
        """LoRA adapters, or the whole transformer, as diffusers loads them. Returns where. Collective."""
        model, _ = get_state_dict(self.transformer, self.optimizer, options=_options(cpu_offload=True))
        if self.settings.lora:
            folder = self.settings.out / "lora"
            if dist.get_rank() == 0:
                from diffusers import WanPipeline
                from peft import get_peft_model_state_dict

                layers = get_peft_model_state_dict(self.transformer, state_dict=model)
                WanPipeline.save_lora_weights(folder, transformer_lora_layers=layers)
        else:
            folder = self.settings.out / "transformer"
            if dist.get_rank() == 0:
                self.transformer.save_config(folder)
                save_file(model, folder / "diffusion_pytorch_model.safetensors", metadata={"format": "pt"})
        meet()
        return folder


def _options(**more: bool) -> StateDictOptions:
    return StateDictOptions(full_state_dict=True, ignore_frozen_params=True, **more)

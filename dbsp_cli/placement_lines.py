"""What to paste into each host for a placement, or why the host cannot run it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from typing import Any

from dbsp_cli.placement import Placement
from dbsp_core.config.config import DbspConfig
from dbsp_core.models.spec import ModelSpec
from dbsp_core.utils.yaml_file import shipped_configs

__all__ = ["HOST_LINES", "HostLine", "lines_for"]


@dataclass(frozen=True)
class HostLine:
    """One of the two: the text to paste, or why there is none.

    Attributes:
        note: What the text does not say.
    """

    host: str
    line: str | None = None
    reason: str | None = None
    note: str | None = None


def lines_for(placement: Placement, model: ModelSpec, mask: str | None) -> list[HostLine]:
    """The lines of all hosts for a placement.

    Args:
        mask: A mask as `--sp-mask` takes it; None: the settings shipped for the model.
    """
    return [make(placement, model, mask) for make in HOST_LINES.values()]


def _diffusers(placement: Placement, model: ModelSpec, mask: str | None) -> HostLine:
    if placement.guidance > 1 and not _one_batch(model):
        return HostLine("diffusers", reason=_PASSES_IN_TURN.format(model.pipeline))
    x, y = placement.strategy.ulysses, placement.strategy.ring
    options = [f'strategy="{placement.strategy}"']
    before = ""
    if placement.videos * placement.guidance > 1:
        sizes = {"data": placement.videos, "batch": placement.guidance, "ring": y, "ulysses": x}
        before = (
            f'mesh = torch.distributed.init_device_mesh("cuda", {tuple(sizes.values())}, '
            f"mesh_dim_names={tuple(sizes)})\n"
        )
        options = ["mesh=mesh"]
        if placement.guidance > 1:
            options.append('batch_group=mesh["batch"].get_group()')
            options.append('everyone=mesh["batch", "ring", "ulysses"]._flatten().get_group()')
    options += ["vae=True"] if placement.vae else []
    config = [] if mask is None else [json.dumps(mask)]
    return HostLine("diffusers", f"{before}dbsp_diffusers.enable({', '.join(['pipe', *config, *options])})")


def _para(placement: Placement, model: ModelSpec, mask: str | None) -> HostLine:
    if placement.guidance > 1 and not _one_batch(model):
        return HostLine("para-attn", reason=_PASSES_IN_TURN.format(model.pipeline))
    if placement.videos > 1:
        return HostLine("para-attn", reason=_OF_ONE_VIDEO)
    sizes = f"max_batch_dim_size={placement.guidance}, max_ring_dim_size={placement.strategy.ring}"
    settings: dict[str, Any] = _own_settings(model, mask) | {"strategy": str(placement.strategy)}
    settings |= {"vae": True} if placement.vae else {}
    mesh = f'init_context_parallel_mesh("cuda", {sizes})'
    return HostLine("para-attn", f'parallelize_pipe(pipe, mesh={mesh}, attn="dbsp", config={settings!r})')


def _generate(placement: Placement, model: ModelSpec, mask: str | None) -> HostLine:
    if placement.guidance > 1:
        return HostLine("dbsp generate", reason="it makes one video on all GPUs, which share both guidance passes")
    if placement.videos > 1:
        return HostLine("dbsp generate", reason=_OF_ONE_VIDEO)
    changes = [f"strategy={placement.strategy}", *(["vae=true"] if placement.vae else [])]
    if mask is not None:
        changes.append(f"mask={json.dumps(_own_settings(model, mask)['mask'])}")
    options = " ".join(f"--set '{change}'" if " " in change else f"--set {change}" for change in changes)
    line = f"dbsp generate --model {model.name} --nproc {placement.gpus} {options}"
    return HostLine("dbsp generate", line, note="on several nodes --nproc is of each, with --nnodes")


def _xdit(placement: Placement, model: ModelSpec, mask: str | None) -> HostLine:
    if placement.guidance > 1 and model.pipeline not in ("CogVideoXPipeline", "WanImageToVideoPipeline"):
        return HostLine("xDiT", reason="xDiT has no --use_cfg_parallel for it")
    options = [f"--model {model.names[-1]}", f"--ulysses_degree {placement.strategy.ulysses}"]
    options.append(f"--ring_degree {placement.strategy.ring}")
    options += ["--use_cfg_parallel"] if placement.guidance > 1 else []
    options += [f"--data_parallel_degree {placement.videos}"] if placement.videos > 1 else []
    options.append("--sp-backend dbsp")
    options += ["--sp-vae"] if placement.vae else []
    options += [] if mask is None else [f"--sp-mask '{mask}'"]
    note = "without --input_images, --prompt and the like" if model.signature.images[0] else "without --prompt"
    return HostLine("xDiT", " ".join(["xdit", *options]), note=note)


def _vllm_omni(placement: Placement, model: ModelSpec, mask: str | None) -> HostLine:
    reason = _not_served(placement, model)
    if reason is not None:
        return HostLine("vLLM-Omni", reason=reason)
    options = [f"--usp {placement.strategy.ulysses}", f"--ring {placement.strategy.ring}"]
    options += [f"--cfg-parallel-size {placement.guidance}"] if placement.guidance > 1 else []
    if placement.vae:
        options += ["--vae-use-tiling", f"--vae-patch-parallel-size {placement.of_a_video}"]
    options.append("--diffusion-attention-config.per_role.self.backend DBSP")
    return HostLine("vLLM-Omni", f"{_environment(model, mask)} vllm serve {model.hub} --omni {' '.join(options)}")


def _sglang(placement: Placement, model: ModelSpec, mask: str | None) -> HostLine:
    reason = _not_served(placement, model)
    if reason is not None:
        return HostLine("SGLang", reason=reason)
    options = [f"--num-gpus {placement.gpus}", f"--ulysses-degree {placement.strategy.ulysses}"]
    options += [f"--ring-degree {placement.strategy.ring}", f"--cfg-parallel-size {placement.guidance}"]
    line = f"{_environment(model, mask)} sglang serve --model-path {model.hub} {' '.join(options)}"
    return HostLine("SGLang", line, note="it decodes as it always does" if placement.vae else None)


def _lightx2v(placement: Placement, model: ModelSpec, mask: str | None) -> HostLine:
    reason = _not_served(placement, model)
    if reason is not None:
        return HostLine("LightX2V", reason=reason)
    parallel: dict[str, Any] = {"seq_p_size": placement.strategy.world, "seq_p_attn_type": "dbsp"}
    parallel |= {"cfg_p_size": placement.guidance} if placement.guidance > 1 else {}
    parallel["vae_parallel"] = placement.vae
    parallel["dbsp"] = _own_settings(model, mask) | {"strategy": str(placement.strategy)}
    note = "it decodes in parallel in a way of its own" if placement.vae else None
    return HostLine("LightX2V", f'"parallel": {json.dumps(parallel)}', note=note)


_PASSES_IN_TURN = "{} runs its guidance passes one after the other"
_OF_ONE_VIDEO = "all its ranks make one video; start it once for each group of GPUs"

HOST_LINES: dict[str, Callable[[Placement, ModelSpec, str | None], HostLine]] = {
    "diffusers": _diffusers,
    "para-attn": _para,
    "dbsp generate": _generate,
    "xDiT": _xdit,
    "vLLM-Omni": _vllm_omni,
    "SGLang": _sglang,
    "LightX2V": _lightx2v,
}
"""By host, what makes its line."""


def _one_batch(model: ModelSpec) -> bool:
    return model.pipeline == "CogVideoXPipeline"


def _not_served(placement: Placement, model: ModelSpec) -> str | None:
    """Why an engine with db-SP does not run a placement, or None."""
    if not model.pipeline.startswith("Wan"):
        return f"db-SP does not run {model.name} in it"
    return _OF_ONE_VIDEO.replace("it once", "a server") if placement.videos > 1 else None


def _shipped(model: ModelSpec) -> str | None:
    """The name of the settings that are shipped for a model."""
    name = f"{model.name}-sparge"
    return name if (shipped_configs() / f"{name}.yaml").is_file() else None


def _environment(model: ModelSpec, mask: str | None) -> str:
    return f"DBSP_CONFIG={mask or _shipped(model) or 'dense'}"


def _own_settings(model: ModelSpec, masks: str | None) -> dict[str, Any]:
    """Where attention is sparse, as a mapping of settings."""
    config = DbspConfig.load(masks or _shipped(model))
    values = replace(config, transformer_2={}).to_values()
    usual = DbspConfig().to_values()
    mask: Any = config.mask
    defaults = {one.name: one.default for one in fields(mask)} if is_dataclass(mask) else {}
    chosen = {"mask": {key: value for key, value in values["mask"].items() if value != defaults.get(key, MISSING)}}
    schedule = {key: value for key, value in values["dense_schedule"].items() if value != usual["dense_schedule"][key]}
    return chosen | ({"dense_schedule": schedule} if schedule else {})

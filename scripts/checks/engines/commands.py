"""Engines' own commands, or offline entry, on CPU ranks, from a prompt to a file, with a tiny checkpoint.

Three videos of one seed: on two ranks in a ring with db-SP, on one with db-SP, and on one without.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from dbsp_cli.tiny_models import make_tiny
from scripts.checks.engines.runs import environment_of, succeed

OF_LIGHTX2V = {"source": "radial", "width": 0.4, "sink_frames": 0, "block_q": 16, "block_k": 8}
"""Known masks: of random weights, rounding may decide whether a predicted block is active."""
IN_ENVIRONMENT = {"DBSP_CONFIG": "sparge:cdf=0.6,block_q=16,block_k=8"}
IN_FLOAT32 = [word for part in ("dit", "vae", "vae-decode") for word in (f"--{part}-precision", "fp32")]
PROMPT, SIZE = "the sea at dusk", {"height": 64, "width": 96, "num-frames": 9, "num-inference-steps": 2, "seed": 3}


def differences(engine: str, folder: Path) -> dict[str, float]:
    """Returns mean differences of pixels (0 to 255) from one process with db-SP: two ranks, and dense attention."""
    alone = frames(generate(engine, folder, "alone", ranks=1))
    return {
        "ring": float(np.abs(frames(generate(engine, folder, "ring", ranks=2)) - alone).mean()),
        "dense": float(np.abs(frames(generate(engine, folder, "dense", ranks=1, mask=False)) - alone).mean()),
    }


def generate(engine: str, folder: Path, name: str, ranks: int, mask: bool = True, *options: str) -> Path:
    """Runs the engine's command; the checkpoint is made in `folder` once. Raises RuntimeError where it fails."""
    return ENGINES[engine](folder, name, ranks, mask, *options)


def frames(video: Path) -> np.ndarray:
    """Reads float32[frames, height, width, 3], 0 to 255."""
    if video.suffix == ".npy":
        return np.load(video)
    import imageio.v3

    return np.stack(list(imageio.v3.imiter(video))).astype(np.float32)


def _with_vllm_omni(folder: Path, name: str, ranks: int, mask: bool, *options: str) -> Path:
    model, made = folder / "model", folder / f"{name}.npy"
    if not model.exists():
        make_tiny("wan-trained", model)  # on random weights of its scale a mask changes no pixel
    settings: dict[str, Any] = {"ring_degree": ranks, "dtype": "float32", "enforce_eager": True}
    if mask:
        settings["diffusion_attention_config"] = {"per_role": {"self": {"backend": "DBSP"}}}
    sampling = {option.replace("-", "_"): value for option, value in SIZE.items()} | {"guidance_scale": 4.0}
    what = [str(model), PROMPT, str(made), json.dumps(settings), json.dumps(sampling)]
    command = ["scripts.checks.engines.vllm_omni_command", *what, *options]
    _succeed("vllm_omni", folder, command, IN_ENVIRONMENT if mask else {})
    return made


def _with_sglang(folder: Path, name: str, ranks: int, mask: bool, *options: str) -> Path:
    model = folder / "Wan2.1-T2V-1.3B-Diffusers"  # by whose name SGLang knows what it is
    if not model.exists():
        make_tiny("wan-trained", model)  # on random weights of its scale a mask changes no pixel
    size = [word for option, value in SIZE.items() for word in (f"--{option}", str(value))]
    parallel = ["--num-gpus", str(ranks), *(("--ring-degree", str(ranks)) if ranks > 1 else ())]
    command = ["scripts.checks.engines.sglang_stubs", "generate", "--model-path", str(model), "--prompt", PROMPT]
    where = ["--output-path", str(folder), "--output-file-name", f"{name}.mp4", *IN_FLOAT32]
    _succeed("sglang", folder, [*command, *size, *parallel, *where, *options], IN_ENVIRONMENT if mask else {})
    return folder / f"{name}.mp4"


def _with_lightx2v(folder: Path, name: str, ranks: int, mask: bool, *options: str) -> Path:
    model, settings, video = folder / "model", folder / f"{name}.json", folder / f"{name}.mp4"
    if not model.exists():
        _succeed("lightx2v", folder, ["scripts.checks.engines.lightx2v_command", str(model)])
    config: dict[str, Any] = {"infer_steps": 2, "target_video_length": 9, "text_len": 16, "enable_cfg": True}
    config |= {"target_height": 64, "target_width": 96, "sample_guide_scale": 2.0, "sample_shift": 5.0}
    config |= dict.fromkeys(("self_attn_1_type", "cross_attn_1_type", "cross_attn_2_type"), "torch_sdpa")
    config |= {"rms_norm_type": "torch", "rope_type": "torch_complex_rope", "modulate_type": "torch"}
    config |= {"cpu_offload": False, "use_lightvae": True}
    if ranks > 1:
        sharing = {"seq_p_attn_type": "dbsp", "dbsp": {"mask": OF_LIGHTX2V, "strategy": f"U1R{ranks}"}}
        config["parallel"] = {"seq_p_size": ranks, "vae_parallel": False} | sharing  # whose parts it pads
    elif mask:
        config |= {"self_attn_1_type": "dbsp", "dbsp": {"mask": OF_LIGHTX2V}}
    settings.write_text(json.dumps(config), encoding="utf-8")
    start = ["torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks), "-m"] if ranks > 1 else []
    command = [*start, "scripts.checks.engines.lightx2v_command", "--model_cls", "wan2.1", "--task", "t2v"]
    what = ["--model_path", str(model), "--config_json", str(settings), "--prompt", PROMPT]
    how = ["--seed", str(SIZE["seed"]), "--save_result_path", str(video)]
    _succeed("lightx2v", folder, [*command, *what, *how, *options])
    return video


ENGINES = {"vllm_omni": _with_vllm_omni, "sglang": _with_sglang, "lightx2v": _with_lightx2v}


def _succeed(engine: str, folder: Path, command: list[str], environment: dict[str, str] | None = None) -> None:
    stubs = folder / "stubs"
    stubs.mkdir(exist_ok=True)
    succeed(command, environment_of(engine, stubs) | {"OMP_NUM_THREADS": "1"} | (environment or {}), folder)

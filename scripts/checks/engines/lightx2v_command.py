"""LightX2V's own command on CPUs: as `python -m lightx2v.infer`, after what `lightx2v_stubs` replaces.

torchrun --nproc_per_node N -m scripts.checks.engines.lightx2v_command --model_path FOLDER --config_json FILE …
python -m scripts.checks.engines.lightx2v_command FOLDER         makes a tiny checkpoint

Also replaced: the sizes of its text encoder; bf16, by float32. Weights are moved to its device from those LightX2V
takes for offloaded ones, as they are on the CPU.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from scripts.checks.engines.lightx2v_checkpoint import make_checkpoint, small_text_encoder
from scripts.checks.engines.lightx2v_stubs import in_float32, put_in_place

put_in_place()

import lightx2v_platform.set_ai_device  # noqa: E402, F401  loads plug-ins

in_float32()
from lightx2v.infer import main  # noqa: E402
from lightx2v.models.input_encoders.hf.wan.t5 import model  # noqa: E402
from lightx2v.models.networks.wan.model import WanModel  # noqa: E402

_load = WanModel._init_weights


def load_to_device(transformer: WanModel, *weights: Any) -> None:
    _load(transformer, *weights)
    for part in (transformer.pre_weight, transformer.transformer_weights):
        part.to_cuda()


if len(sys.argv) == 2:
    make_checkpoint(Path(sys.argv[1]), heads=3, layers=2)
else:
    model.umt5_xxl = small_text_encoder()
    WanModel._init_weights = load_to_device
    main()

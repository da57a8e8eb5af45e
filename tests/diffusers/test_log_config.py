"""The kernel in the log is the one that attention takes for the model's device, dtype and head size."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import torch

from dbsp_core import SequenceGroup
from dbsp_core.config import DbspConfig
from dbsp_core.models.signature import model_signature
from dbsp_core.models.table import MODEL_SPECS, model_title
from dbsp_diffusers import resolve
from dbsp_kernels import KERNELS


def test_model_with_other_names_for_its_sizes_is_logged_with_its_kernel(monkeypatch):
    said = []
    monkeypatch.setattr(resolve, "_log_once", said.append)
    monkeypatch.delenv("DBSP_KERNEL", raising=False)
    ernie = model_signature("ErnieImagePipeline", {"hidden_size": 144, "num_attention_heads": 6, "num_layers": 2})
    resolve.log_config(DbspConfig(), model_title(ernie), ernie.sizes[2], SequenceGroup(0, 1), None, torch.empty(0))
    assert said[0].startswith("a ErnieImagePipeline on 1 rank, ")
    assert said[0].endswith("kernel cpu")


def test_kernel_in_the_log_is_chosen_for_the_models_dtype_and_head_size(monkeypatch):
    said = []
    monkeypatch.setattr(resolve, "_log_once", said.append)
    monkeypatch.delenv("DBSP_KERNEL", raising=False)
    narrow = replace(KERNELS["cpu"], name="narrow", dtypes=frozenset({torch.bfloat16}), head_dims=range(1, 65))
    with mock.patch.dict(KERNELS, {"narrow": narrow, **KERNELS}, clear=True):  # restores their order, which counts
        for model, dtype in (
            ("cogvideox-5b", torch.bfloat16),
            ("cogvideox-5b", torch.float32),
            ("wan2.1-t2v-14b", torch.bfloat16),
        ):
            signature = MODEL_SPECS[model].signature
            like, head_dim = torch.empty(0, dtype=dtype), signature.sizes[2]
            resolve.log_config(DbspConfig(), model, head_dim, SequenceGroup(0, 1), None, like)
    assert [line.partition(" on 1 rank")[0] for line in said if "kernel" in line] == [
        "cogvideox-5b",
        "cogvideox-5b",
        "wan2.1-t2v-14b",
    ]
    assert [line.rpartition("kernel ")[2] for line in said if "kernel" in line] == ["narrow", "cpu", "cpu"]

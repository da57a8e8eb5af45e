"""What the simulated node runs: a tiny transformer of each class that db-SP knows, against one process on the CPU."""

from __future__ import annotations

from typing import Any

import torch

import dbsp_diffusers
from dbsp_core import SequenceGroup
from dbsp_diffusers.models import ARCHITECTURES
from tests.diffusers.models.model_cases import WITHOUT_GRID, outputs
from tests.support.models.tiny_transformers import HEADS, TINY, WIDTH, make_tiny_transformer, tiny_inputs
from tests.support.oracle import largest_difference
from tests.support.shared import shared
from tests.support.single_process import attach_single_process

BLOCKS = {"block_q": 16, "block_k": 16}
MASKS: dict[str, dict[str, Any]] = {
    "static": {"source": "synthetic", "density": 0.4, **BLOCKS},
    "predicted": {"source": "sol", "tau": 0.3, "dense_text": False, **BLOCKS},
    "selected": {"source": "sparge", "cdf": 0.5, "similarity": 0.1, "dense_text": False, **BLOCKS},
}
DENSE = {"source": "dense", **BLOCKS}
"""The static mask of models whose tokens make no grid."""
NUMBERED = ("vace", "animate", "consisid", "ltx2.3")
"""Models whose configuration or inputs name layers by number."""
_LAYERS = dict.fromkeys(("num_layers", "num_single_layers", "num_visual_blocks", "n_layers"), 1)


def brief(model: str, **options: Any) -> Any:
    """Returns a tiny transformer with one layer of each kind, and with three heads where nothing else says six."""
    sizes = TINY[model].sizes
    fewer = {} if model in NUMBERED else {name: count for name, count in _LAYERS.items() if name in sizes}
    if "num_attention_heads" in sizes and HEADS * WIDTH not in sizes.values() and model != "consisid":
        fewer["num_attention_heads"] = 3
    return make_tiny_transformer(model, **fewer | options)


def brief_inputs(model: str) -> dict[str, Any]:
    """Returns inputs of three blocks or more: of video alone 48 tokens; with 9 or more of text in it, 24."""
    alone = ARCHITECTURES[TINY[model].cls].text is None
    return tiny_inputs(model, (2, 3, 8) if alone else (1, 3, 8) if "2D" in TINY[model].cls else (3, 2, 4))


def mask_for(model: str, mask: str) -> dict[str, Any]:
    return DENSE if mask == "static" and model in WITHOUT_GRID else MASKS[mask]


def own_device(rank: int) -> torch.device:
    """Returns the rank's device, which is then the current one."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    return device


def moved(value: Any, to: torch.device | torch.dtype) -> Any:
    """Returns a transformer's inputs on a device, or in another dtype; numbers such as timesteps stay in float32."""
    if isinstance(value, dict):
        return {name: moved(one, to) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(moved(one, to) for one in value)
    if not isinstance(value, torch.Tensor):
        return value
    casts = value.dtype == torch.float32 and value.dim() > 1
    return value.to(to) if isinstance(to, torch.device) or casts else value


@shared
def on_one_process(model: str, mask: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Returns what a transformer gives with a mask, and without."""
    transformer, inputs = brief(model), brief_inputs(model)
    with torch.no_grad():
        dense = outputs(transformer, inputs)
        attach_single_process(transformer, {"mask": mask_for(model, mask)})
        return outputs(transformer, inputs), dense


def apart(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    return max(largest_difference(one.cpu().float(), other) for one, other in zip(found, expected, strict=True))


def model_on_gpus(rank: int, world: int, model: str, mask: str) -> tuple[float, float]:
    """Returns the largest difference from one process on the CPU, and of that one from dense attention."""
    device = own_device(rank)
    expected, dense = on_one_process(model, mask)
    transformer = brief(model).to(device)
    dbsp_diffusers.enable(transformer, {"mask": mask_for(model, mask)})
    with torch.no_grad():
        found = outputs(transformer, moved(brief_inputs(model), device))
    dbsp_diffusers.disable(transformer)
    return apart(found, expected), apart(expected, dense)


def model_in_bfloat16(rank: int, world: int, model: str) -> float:
    """Returns the root mean square of the difference from one process in float32, as a share of its values'."""
    device = own_device(rank)
    expected, _ = on_one_process(model, "static")
    transformer = _in_bfloat16(brief(model)).to(device)
    dbsp_diffusers.enable(transformer, {"mask": mask_for(model, "static")})
    with torch.no_grad():
        found = outputs(transformer, moved(moved(brief_inputs(model), torch.bfloat16), device))
    dbsp_diffusers.disable(transformer)
    difference = torch.cat([(one.cpu().float() - other).flatten() for one, other in zip(found, expected, strict=True)])
    return float(difference.norm() / torch.cat([one.flatten() for one in expected]).norm())


def _in_bfloat16(transformer: Any) -> Any:
    """Casts as from_pretrained does, which leaves some modules in float32."""
    kept = set(transformer._keep_in_fp32_modules or ())
    for name, parameter in transformer.named_parameters():
        if kept.isdisjoint(name.split(".")):
            parameter.data = parameter.data.to(torch.bfloat16)
    return transformer


@shared
def gradients_on_one_process(model: str, mask: str) -> dict[str, torch.Tensor]:
    transformer = brief(model).train()
    attach_single_process(transformer, {"mask": MASKS[mask]})
    loss_of(transformer, brief_inputs(model)).backward()
    return {name: p.grad for name, p in transformer.named_parameters() if p.grad is not None}


def loss_of(transformer: Any, inputs: dict[str, Any]) -> torch.Tensor:
    """Weighs every output at random."""
    draws, parts = torch.Generator().manual_seed(5), outputs(transformer, inputs)
    return torch.stack([(out * torch.randn(out.shape, generator=draws).to(out)).mean() for out in parts]).sum()


def gradients_on_gpus(rank: int, world: int, model: str, mask: str) -> tuple[float, float]:
    """Returns how far gradients of parameters are from one process's, as a share of the largest, summed and not."""
    device = own_device(rank)
    expected = gradients_on_one_process(model, mask)
    transformer = brief(model).train().to(device)
    dbsp_diffusers.enable(transformer, {"mask": MASKS[mask]})
    loss_of(transformer, moved(brief_inputs(model), device)).backward()
    dbsp_diffusers.disable(transformer)
    found = {name: p.grad for name, p in transformer.named_parameters() if p.grad is not None}
    assert found.keys() == expected.keys()
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    partial = apart([found[name] for name in expected], list(expected.values()))
    summed = [summed_over_ranks(found[name]) for name in expected]
    return apart(summed, list(expected.values())) / largest, partial / largest


def summed_over_ranks(gradient: torch.Tensor) -> torch.Tensor:
    """Returns the sum over ranks, which `sum_gradients` takes by torch.distributed: rank threads have none."""
    return torch.stack(SequenceGroup.from_group().all_gather(gradient)).sum(0)

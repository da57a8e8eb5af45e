"""Trains on images and videos at once, measured as KnapFormer is: torchrun --nproc_per_node 8 train_knapformer.py

A model of FLUX's size and random samples of the sizes that data codes name (data_codes.py), with FSDP2, activation
checkpointing and bags of ranks. First γ of the paper's Eq. 2 is fitted on this machine. Then each step prints WIR, the
load of the busiest rank over the idlest one's, as loaded and as shared out; FBL, seconds of forward and backward; TPS,
tokens per second; and HFU, the share of the peak that the FLOP of 4 forwards reach: forward, the same again in
backward, and backward itself. (Zhang et al., KnapFormer, 2025, sections 3.1 and 4.)
"""

import argparse
import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from data_codes import DrawnSequences, draw, parse_streams
from diffusers import HunyuanVideoTransformer3DModel
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import distribute_tensor

import dbsp_diffusers
from dbsp_core.cost.machine import load_hardware, save_hardware
from dbsp_diffusers import PackedSample, packed_forward_local

GPU = torch.cuda.is_available()
if GPU:
    HEADS, HEAD_DIM, DOUBLE, SINGLE = 24, 128, 19, 38  # 12 billion parameters
    SHAPE = {}
    STREAMS = "g4b4i256f1s0,g2b2i1024f1s0,g1b1i2048f1s0,g1b1i512f85s1"
    FIT_SIDES = (256, 512, 1024, 1536, 2048)  # pixels of the images whose seconds γ is fitted to
else:  # to try it: torchrun --nproc_per_node 4
    HEADS, HEAD_DIM, DOUBLE, SINGLE = 4, 32, 1, 2
    SHAPE = {"in_channels": 4, "out_channels": 4, "text_embed_dim": 32, "pooled_projection_dim": 16}
    SHAPE |= {"num_refiner_layers": 1, "rope_axes_dim": (8, 12, 12)}
    STREAMS = "g1b2i256f1s0,g1b1i256f17s1,g2b2i128f1s0"
    FIT_SIDES = (128, 256, 384, 512)
LAYERS, WIDTH, BLOCK = DOUBLE + SINGLE, HEADS * HEAD_DIM, 64
DEVICE, DTYPE = ("cuda", torch.bfloat16) if GPU else ("cpu", torch.float32)


def flop(tokens, gamma=1.0):
    """FLOP of sequences in one layer's forward (Eq. 1); with γ what its seconds are proportional to (Eq. 2)."""
    return 24 * tokens * WIDTH**2 + gamma * 4 * tokens**2 * WIDTH


def fit_gamma(tokens, seconds):
    """Fits seconds = a + b · (24·n·d² + γ·4·n²·d) to steps of one sequence of n tokens on each rank.

    Returns:
        γ, and the FLOP per second of all that is not attention.
    """
    tokens, seconds = np.asarray(tokens, dtype=float), np.asarray(seconds, dtype=float)
    terms = np.stack([np.ones_like(tokens), 24 * tokens * WIDTH**2, 4 * tokens**2 * WIDTH], axis=1)
    scale = terms.max(axis=0)
    relative = terms / scale / seconds[:, None]  # so that errors of short and long steps count alike
    _, linear, pairs = np.linalg.lstsq(relative, np.ones_like(seconds), rcond=None)[0] / scale
    if linear <= 0 or pairs <= 0:
        raise SystemExit("the seconds do not grow as Eq. 2 says, as on a busy machine; start again, or give --gamma")
    return pairs / linear, 4 * LAYERS / linear


def sharded_transformer():
    """Builds the model in parts that never exist whole: every rank draws each weight, and keeps its share."""
    with torch.device("meta"):
        transformer = HunyuanVideoTransformer3DModel(
            num_attention_heads=HEADS,
            attention_head_dim=HEAD_DIM,
            num_layers=DOUBLE,
            num_single_layers=SINGLE,
            **SHAPE,
        )
    # 1. FSDP2 on each block and on the rest.
    mesh, policy = init_device_mesh(DEVICE, (dist.get_world_size(),)), MixedPrecisionPolicy(param_dtype=DTYPE)
    for part in (*transformer.transformer_blocks, *transformer.single_transformer_blocks, transformer):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    transformer.to_empty(device=DEVICE)
    # 2. Weights: yours, of a checkpoint.
    for number, (name, parameter) in enumerate(transformer.named_parameters()):
        draws = torch.Generator(DEVICE).manual_seed(number)
        if parameter.ndim > 1:
            whole = torch.randn(parameter.shape, generator=draws, device=DEVICE) * parameter[0].numel() ** -0.5
        else:
            whole = torch.full(parameter.shape, 0.0 if name.endswith("bias") else 1.0, device=DEVICE)
        parameter.data.copy_(distribute_tensor(whole, mesh, parameter.placements))
    transformer.enable_gradient_checkpointing()
    return transformer.train()


def loaded(transformer, sequences, step):
    """Returns what this rank's loader gives, as pairs of a noisy sample and its velocity. A sequence's are the same
    on any number of ranks."""
    pairs = []
    for number in np.flatnonzero(sequences.loader % dist.get_world_size() == dist.get_rank()).tolist():
        draws, config = torch.Generator().manual_seed(1000 * step + number), transformer.config
        frames, rows, columns = sequences.thw[number].tolist()
        size = config.in_channels, frames, config.patch_size * rows, config.patch_size * columns
        clean, noise = torch.randn(2, *size, generator=draws).to(DEVICE, DTYPE)  # yours: encoded images and videos
        text = torch.randn(int(sequences.text[number]), config.text_embed_dim, generator=draws)  # yours: prompts
        pooled, level = torch.randn(config.pooled_projection_dim, generator=draws), torch.rand((), generator=draws)
        sample = PackedSample(
            torch.lerp(clean, noise, level.to(DEVICE, DTYPE)),
            1000 * level.to(DEVICE),
            text.to(DEVICE, DTYPE),
            pooled=pooled.to(DEVICE, DTYPE),
            guidance=6000.0,
        )
        pairs.append((sample, noise - clean))
    return pairs


def forward_backward(transformer, pairs, count, bags):
    """Makes the gradients of the mean loss of `count` samples on all ranks.

    Returns:
        How the samples were shared out, the loss, and FBL, the slowest rank's seconds.
    """
    dist.barrier()
    start = time.perf_counter()
    found = packed_forward_local(transformer, [sample for sample, _ in pairs], bags=bags)
    loss = found.zero.float()  # lets a rank without samples take part in backward
    for prediction, (_, velocity) in zip(found.samples, pairs, strict=True):
        loss = loss + F.mse_loss(prediction.float(), velocity.float()) / count
    loss.backward()
    if GPU:
        torch.cuda.synchronize()
    seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64, device=DEVICE)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    dbsp_diffusers.sum_gradients(transformer)
    dist.all_reduce(total := loss.detach().double())
    return found, float(total), float(seconds)


def time_images(transformer, repeats=3):
    """Returns tokens and seconds of steps with one image on each rank, by the images' sizes; the same on all ranks."""
    tokens, seconds, world = [], [], dist.get_world_size()
    for side in FIT_SIDES:
        thw = np.array([[1, side // 16, side // 16]] * world)
        sequences = DrawnSequences(np.ones(world, dtype=np.int64), thw, np.arange(world))
        pairs = loaded(transformer, sequences, step=0)
        runs = [forward_backward(transformer, pairs, world, "g1n1")[2] for _ in range(repeats)]
        tokens.append(int(sequences.tokens[0]))
        seconds.append(min(runs))
        transformer.zero_grad()
    return tokens, seconds


def settings_by(gamma, flops_per_s):
    """Returns db-SP's settings, with bags that are filled by Eq. 2."""
    known = load_hardware("h100" if GPU else "cpu-demo")
    rates = {"linear_flops_per_s": float(flops_per_s), "flops_per_s": float(flops_per_s / gamma)}
    constants = replace(known.constants, **rates, score_s=0.0, row_s=0.0)
    file = Path(tempfile.mkdtemp()) / "fitted.yaml"
    save_hardware(file, replace(known, constants=constants, kernels={}, flops_by_blocks={}))
    return {"mask": {"source": "dense", "block_q": BLOCK, "block_k": BLOCK}, "machine": str(file)}


def imbalance(found, sequences, gamma):
    """Returns WIR as loaded, by Eq. 2, and as shared out, by tokens that ranks held and blocks they computed."""
    rank, world = dist.get_rank(), dist.get_world_size()
    before = np.bincount(sequences.loader % world, flop(sequences.tokens, gamma), world)
    blocks = 0.0
    if found.session is not None:  # else this rank's bag has no sequences
        plans = found.session.records.values()
        blocks = np.mean([plan.work[found.session.group.rank] for plan in plans])
    tokens = int(found.plan.runs.by_rank(world)[rank])
    load = 24 * tokens * WIDTH**2 + gamma * 4 * HEAD_DIM * BLOCK**2 * blocks
    after = [None] * world
    dist.all_gather_object(after, float(load))
    with np.errstate(divide="ignore"):
        return [float(np.max(loads) / np.min(loads)) for loads in (before, after)]


def measured_peak(side=8192 if GPU else 1024, repeats=5):
    """Returns FLOP per second of the product of two large matrices, while all ranks do the same."""
    matrix, seconds = torch.randn(side, side, device=DEVICE, dtype=DTYPE), []
    for _ in range(repeats):
        start = time.perf_counter()
        (matrix @ matrix)[0, 0].item()
        seconds.append(time.perf_counter() - start)
    return 2 * side**3 / min(seconds)


def main():
    local, world = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["WORLD_SIZE"])
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--streams", default=STREAMS, help="data codes, as in KnapFormer's section 4.1")
    parser.add_argument("--bags", default=f"g{local}n{world // local}", help="bags of ranks; g1n1: as loaded")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--gamma", type=float, help="γ of Eq. 2; fitted on this machine if left out")
    parser.add_argument("--peak-tflops", type=float, help="of a device; measured if left out (H100, bfloat16: 989)")
    options = parser.parse_args()
    if GPU:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if GPU else "gloo")
    transformer = sharded_transformer()
    optimizer = torch.optim.AdamW(transformer.parameters(), lr=1e-4)

    # 1. γ of this machine, which bags are filled by.
    gamma, flops_per_s = options.gamma, 1e12
    if gamma is None:
        dbsp_diffusers.enable(transformer, {"mask": "dense"})
        gamma, flops_per_s = fit_gamma(*time_images(transformer))
        dbsp_diffusers.disable(transformer)
    peak = options.peak_tflops * 1e12 if options.peak_tflops else measured_peak()
    if dist.get_rank() == 0:
        print(f"γ {gamma:.3f}, peak {peak / 1e12:.3g} TFLOP/s of each of {world} ranks")
    dbsp_diffusers.enable(transformer, settings_by(gamma, flops_per_s))

    # 2. Steps. All ranks draw the sizes of all loaders; where loaders outnumber ranks, a rank has several.
    streams = parse_streams(options.streams)
    loaders = max(world, sum(stream.gpus for stream in streams))
    for step in range(options.steps):
        drawn = draw(streams, loaders, seed=step)
        sequences = replace(drawn, text=drawn.text.clip(min=1))
        pairs = loaded(transformer, sequences, step)
        found, loss, seconds = forward_backward(transformer, pairs, len(sequences), options.bags)
        norm = torch.nn.utils.clip_grad_norm_(transformer.parameters(), 1.0).full_tensor()
        optimizer.step()
        optimizer.zero_grad()
        before, after = imbalance(found, sequences, gamma)
        hfu = 4 * LAYERS * flop(sequences.tokens).sum() / (world * peak * seconds)
        if dist.get_rank() == 0:
            print(
                f"step {step}: loss {loss:.6f}, gradient norm {float(norm):.6f}, WIR {before:.4f} → {after:.4f}, "
                f"FBL {seconds:.3f} s, TPS {sequences.tokens.sum() / seconds:.0f}, HFU {hfu:.2%}",
                flush=True,
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

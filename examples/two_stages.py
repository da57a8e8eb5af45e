"""Trains Wan in DSV's two stages: torchrun --nproc_per_node 8 two_stages.py

Stage 1 trains with dense attention. At each attention a low-rank predictor learns to approximate q·k, by a gradient
apart from the model's, and a profiler measures how few blocks of keys hold nine tenths of each head's attention. Once
the predictors' mean loss is below 0.01, stage 2 begins: layers that are sparse enough for it to be worth it attend to
the predicted blocks alone, and ranks are sent no other keys and values. (Tan et al., DSV, 2025, sections 5 and 7.1.2.
DSV projects a layer's input and chooses single keys; here queries and keys are projected, and blocks are chosen.)
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from diffusers import WanPipeline

import dbsp_diffusers
from dbsp_core import BlockGrid, BlockMask
from dbsp_core.config import DbspConfig
from dbsp_core.cost.machine import rates_of
from dbsp_core.layout.strategy import Strategy
from dbsp_core.planning.chunks import Chunks
from dbsp_core.sources.head_shares import heads_by_rank, predict_bits
from dbsp_core.sources.lowrank import gather_own_heads, predicted_mass, project
from dbsp_kernels.prediction import select_blocks

GPU = torch.cuda.is_available()
if GPU:
    MODEL, BLOCK, RANK = "Wan-AI/Wan2.1-T2V-1.3B-Diffusers", 64, 64
    VIDEO = {"height": 480, "width": 832, "num_frames": 81, "num_inference_steps": 30}
else:  # to try it: first `dbsp tiny wan-trained tiny`, then torchrun --nproc_per_node 2
    MODEL, BLOCK, RANK = "tiny", 16, 16
    VIDEO = {"height": 144, "width": 240, "num_frames": 9, "num_inference_steps": 4}
DEVICE = "cuda" if GPU else "cpu"
CAPTIONS = ["a red ball bounces over a blue checkered floor", "a yellow square slides left over a green plain floor"]
GATE, MOST_STEPS, STEPS = 0.01, 400, 8  # the loss that ends stage 1, its most steps, and those of stage 2
RATE, LATER_RATE, EVERY = 1.0, 0.1, 4  # of learning in stage 1 and 2; in stage 2 of every so many steps
SAMPLE, CRITICAL, MOMENTUM = 16, 0.9, 0.9  # one query of so many is looked at; attention that critical keys hold
WORTH = 0.3  # sparsity from which a layer is sparse, where the kernels' speed is not known


class Layer:
    """State of one layer, equal on all ranks: the predictor, and by head its loss and the sparsity.

    Loss and sparsity are running means.
    """

    def __init__(self, heads, head_dim):
        draws = torch.Generator().manual_seed(0)
        bases = torch.linalg.qr(torch.randn(heads, head_dim, head_dim, generator=draws))[0][:, :, :RANK]
        self.query = self.key = bases.contiguous().to(DEVICE)  # [H, D, rank] each
        self.seen = None  # [2, H], the loss, and the share of key blocks that are not critical

    @property
    def loss(self):
        return self.seen[0]

    @property
    def sparsity(self):
        return self.seen[1]


class TwoStages:
    """A mask source that learns from the attentions it is asked about."""

    changes = "per_call"

    def __init__(self, layers, heads, head_dim):
        self.layers, self.worth = [Layer(heads, head_dim) for _ in range(layers)], WORTH
        self.stage, self.step = 1, 0

    def grid(self, request):
        return BlockGrid(request.tokens, request.text_tokens, BLOCK, BLOCK, request.thw)

    def mask(self, request, tokens):
        grid, layer = self.grid(request), self.layers[request.layer]
        if self.stage == 1 or self.step % EVERY == 0:
            self.look(layer, tokens, grid)
        return self.predicted(layer, tokens, grid) if self.is_sparse(layer) else BlockMask.dense(request.heads, grid)

    def is_sparse(self, layer):
        """The dispatcher: in stage 2, a layer whose mean sparsity makes the sparse kernel and the prediction pay."""
        return self.stage == 2 and float(layer.sparsity.mean()) >= self.worth

    def look(self, layer, tokens, grid):
        """Trains the predictor and measures sparsity, each head on the rank that predicts it. Collective."""
        heads = own_heads(tokens)
        # 1. All tokens of this rank's heads, and of the queries a sample: [H here, n, D] and [H here, N, D].
        both = torch.cat([tokens.q, tokens.k], dim=-1).detach().float()
        q, k = gather_own_heads(both, tokens, grid)[:, 0].chunk(2, dim=-1)
        q = q[:, ::SAMPLE]
        scores = q @ k.transpose(1, 2)
        # 2. One step of SGD, apart from the model's graph, and from a checkpoint that this layer may run in.
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved):
            query, key = (side[heads].clone().requires_grad_() for side in (layer.query, layer.key))
            loss = approximation_loss((q @ query) @ (k @ key).transpose(1, 2), scores)
            gradients = torch.autograd.grad(loss.sum(), (query, key))
        rate = RATE if self.stage == 1 else LATER_RATE
        query, key = (side.detach() - rate * gradient for side, gradient in zip((query, key), gradients, strict=True))
        # 3. The fewest blocks that hold nine tenths of a query's attention, mean over queries.
        blocks = torch.as_tensor(grid.k_axis.block_of, device=DEVICE)
        attention = torch.softmax(scores * tokens.scale, dim=-1)
        mass = attention.new_zeros(*q.shape[:2], grid.nk).index_add_(2, blocks, attention)
        held = mass.sort(dim=-1, descending=True).values.cumsum(dim=-1)
        critical = ((held < CRITICAL).sum(dim=-1) + 1).float().mean(dim=-1) / grid.nk
        # 4. All ranks learn what each has found.
        found = [of_all_heads(mine, heads, tokens) for mine in (query, key, loss.detach(), 1 - critical)]
        layer.query, layer.key, now = found[0], found[1], torch.stack(found[2:])
        layer.seen = now if layer.seen is None else MOMENTUM * layer.seen + (1 - MOMENTUM) * now

    def predicted(self, layer, tokens, grid):
        """Predicts a mask: each head's rows have as many blocks as its critical keys have been measured to need."""
        # 1. Each rank projects its own tokens; the projections go to the rank that predicts their head.
        low = torch.cat([project(tokens.q, layer.query), project(tokens.k, layer.key)], dim=-1)  # [B, H, n, 2 · rank]
        rows = gather_own_heads(low, tokens, grid).flatten(0, 1)  # [H here, N, 2 · rank]
        # 2. Of each row the blocks of largest predicted attention.
        kept = iter(((1 - layer.sparsity[own_heads(tokens)]) * grid.nk).ceil().int().tolist())
        no_row_is_dense = torch.zeros(1, grid.nq + grid.nk, dtype=torch.bool, device=DEVICE)

        def choose(some):
            masses = (predicted_mass(*head.chunk(2, dim=-1), grid, tokens.scale)[None] for head in some)
            return torch.cat([select_blocks(mass, no_row_is_dense, None, next(kept)) for mass in masses])

        return BlockMask(predict_bits(rows, choose, tokens, grid), grid)

    def end_step(self):
        """Begins stage 2 once the predictors are good. Returns their mean loss."""
        loss = float(torch.stack([layer.loss for layer in self.layers]).mean())
        if loss < GATE:
            self.stage = 2
        self.step += 1
        return loss


def approximation_loss(approximate, scores):
    """Returns float32[H]: 0.95 · (1 − cosine) + 0.05 · (ratio of norms − 1)², mean over queries, of [H, n, N]."""
    cosine = F.cosine_similarity(approximate, scores, dim=-1)
    ratio = approximate.norm(dim=-1) / scores.norm(dim=-1)
    return (0.95 * (1 - cosine) + 0.05 * (ratio - 1).square()).mean(dim=-1)


def own_heads(tokens):
    """Returns the heads that this rank predicts, as a slice."""
    shares = heads_by_rank(tokens.q.shape[1], tokens.group.size)
    first = sum(shares[: tokens.group.rank])
    return slice(first, first + shares[tokens.group.rank])


def of_all_heads(mine, heads, tokens):
    """Returns [H, ...]: every rank's own heads. Collective."""
    whole = mine.new_zeros(tokens.q.shape[1], *mine.shape[1:])
    whole[heads] = mine
    dist.all_reduce(whole, group=tokens.group.group)  # to each number only zeros are added
    return whole


def keys_received(session):
    """Returns the share of their heads' keys and values that ranks were sent, mean over layers."""
    shares = []
    for plan in session.records.values():
        of_heads = Chunks.of_heads(plan.owner, plan.chunks.k_ring_rank, plan.strategy)
        shares.append(plan.chunks.sent.sum() / of_heads.sent.sum())
    return sum(shares) / len(shares)


def encoded_clips(pipe):
    """Returns latents [1, C, F, H, W] and text [1, tokens, C] of each caption. Yours: encoded clips."""
    clips = []
    for seed, caption in enumerate(CAPTIONS):
        draws = torch.Generator(DEVICE).manual_seed(seed)
        latents = pipe(caption, generator=draws, output_type="latent", **VIDEO).frames
        text, _ = pipe.encode_prompt(caption, do_classifier_free_guidance=False, device=DEVICE)
        clips.append((latents.detach(), text.detach()))
    return clips


def main():
    if GPU:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if GPU else "gloo")
    world, local = dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"])
    pipe = WanPipeline.from_pretrained(MODEL, torch_dtype=torch.float32).to(DEVICE)
    clips = encoded_clips(pipe)
    transformer = pipe.transformer.train()
    transformer.enable_gradient_checkpointing()
    optimizer = torch.optim.AdamW(transformer.parameters(), lr=1e-5)

    # Heads within a node, keys between nodes: selective exchange is for slow links.
    strategy = Strategy(local, world // local) if world > local else Strategy(1, world)
    config = transformer.config
    source = TwoStages(config.num_layers, config.num_attention_heads, config.attention_head_dim)
    settings = DbspConfig(mask=source, strategy=strategy, plan="current", keys="needed")
    dbsp_diffusers.enable(transformer, settings)
    session = dbsp_diffusers.session_of(transformer)
    rates = rates_of(None, torch.device(DEVICE), session.config.kernel)
    if rates is not None:
        break_even = rates.break_even(BLOCK, BLOCK, config.attention_head_dim, clips[0][0][0, 0].numel() // 4)
        source.worth = WORTH if break_even is None else 1 - break_even

    sparse_steps = 0
    while sparse_steps < STEPS:
        if source.stage == 1 and source.step == MOST_STEPS:
            raise SystemExit(f"the approximation loss stays above {GATE}; use a larger RANK, or more MOST_STEPS")
        sparse_steps += source.stage == 2
        torch.manual_seed(source.step)  # what a step draws is the same on all ranks
        clean, text = clips[source.step % len(clips)]
        noise, level = torch.randn_like(clean), torch.rand(1, device=DEVICE)
        predicted = transformer(torch.lerp(clean, noise, level), level * 1000, text, return_dict=False)[0]
        loss = F.mse_loss(predicted, noise - clean)
        optimizer.zero_grad()
        loss.backward()
        dbsp_diffusers.sum_gradients(transformer)
        optimizer.step()
        stage, sparse = source.stage, sum(map(source.is_sparse, source.layers))
        sparsity = float(torch.stack([layer.sparsity for layer in source.layers]).mean())
        approximation = source.end_step()
        if dist.get_rank() == 0:
            print(
                f"stage {stage}, step {source.step - 1}: loss {loss:.6f}, approximation loss {approximation:.4f}, "
                f"sparsity {sparsity:.3f}, {sparse} sparse layers, K/V received {keys_received(session):.3f}",
                flush=True,
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

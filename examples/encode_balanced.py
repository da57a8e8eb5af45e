"""Runs text encoder and autoencoder with balanced work on all ranks, for any number of items per data loader.

KnapFormer's online balancers of T5 and VAE (Zhang et al., 2025, appendix A.2). Used by train_packed.py.
"""

import numpy as np
import torch
import torch.distributed as dist

from dbsp_core.planning.bags import BagTopology
from dbsp_core.planning.sequences import plan_sequences


def encode_balanced(items, costs, encode, device):
    """Encodes all ranks' items, each on the rank with the least work. Collective; without gradients.

    Args:
        items: This rank's tensors, any number of any shapes.
        costs: Work of each, a positive whole number: 1 for prompts padded to one length, pixels for clips.
        encode: Function from an item to its encoding, a tensor.
        device: Device of items and results.

    Returns:
        The encodings of this rank's items, and how many items this rank encoded.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    # 1. All ranks learn costs, shapes and dtypes.
    known = gathered([(cost, item.shape, item.dtype) for cost, item in zip(costs, items, strict=True)])
    loader = np.repeat(np.arange(world), [len(of_rank) for of_rank in known])
    if len(loader) == 0:
        return [], 0
    cost, shapes, dtypes = zip(*(one for of_rank in known for one in of_rank), strict=True)
    # 2. Heaviest first, each to the rank with the least work: KnapFormer's greedy, with bags of one rank.
    bags = BagTopology.parse(f"g1n{world}", world)
    encoder = plan_sequences(np.array(cost), np.ones_like(loader), loader, bags).bag
    # 3. Send items to the ranks that encode them, and results back.
    own = np.flatnonzero(loader == rank).tolist()
    came = sent(dict(zip(own, items, strict=True)), loader, encoder, list(zip(shapes, dtypes, strict=True)), device)
    with torch.no_grad():
        results = {number: encode(item).contiguous() for number, item in came.items()}
    made = gathered({number: (result.shape, result.dtype) for number, result in results.items()})
    kinds = [made[maker][number] for number, maker in enumerate(encoder)]
    back = sent(results, encoder, loader, kinds, device)
    return [back[number] for number in own], len(results)


def gathered(of_rank):
    """Returns every rank's object, by rank. Collective."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, of_rank)
    return found


def sent(tensors, source, target, kinds, device):
    """Sends tensors, by number, from their source ranks to their target ranks; kinds are their shapes and dtypes."""
    rank = dist.get_rank()
    arrived = {number: tensor for number, tensor in tensors.items() if target[number] == rank}
    transfers = []
    for number, (shape, dtype) in enumerate(kinds):
        if source[number] == target[number]:
            continue
        if source[number] == rank:
            transfers.append(dist.P2POp(dist.isend, tensors[number].contiguous(), int(target[number])))
        elif target[number] == rank:
            arrived[number] = torch.empty(shape, dtype=dtype, device=device)
            transfers.append(dist.P2POp(dist.irecv, arrived[number], int(source[number])))
    for transfer in dist.batch_isend_irecv(transfers) if transfers else ():
        transfer.wait()
    return arrived

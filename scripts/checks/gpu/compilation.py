"""Machine code that the Triton here makes of the forward kernel, in processes of their own: nothing is launched.

python -m scripts.checks.gpu.compilation 90 128 64 128 64 8 5 late prints one variant's record as JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial

import torch

from dbsp_kernels.triton.tiles import HOPPER, Tiles
from scripts.checks.gpu.jobs import tile_variants, used_tiles
from scripts.checks.gpu.results import Case, Row
from scripts.checks.gpu.setting import MAIN, Setting, Shape
from scripts.checks.gpu.suite import REPO


def cases(setting: Setting) -> Iterator[Case]:
    for shape in MAIN[1:2] if setting.dry else MAIN:
        for name, tiles in list(tile_variants(setting, shape).items())[: 1 if setting.dry else None]:
            yield Case(f"{shape.name}: {name}", partial(compiled, setting, shape, tiles), limit_s=90)


def compiled(setting: Setting, shape: Shape, tiles: Tiles) -> Iterator[Row]:
    """Compiles one variant with a cold cache; if it is in use, it must not be serialised, or spill in its loops."""
    on_gpu = torch.cuda.is_available() and not setting.simulated
    major, minor = torch.cuda.get_device_capability() if on_gpu else divmod(HOPPER, 10)
    words = [10 * major + minor, shape.block_q, shape.block_k, *vars(tiles).values()]
    command = [sys.executable, "-m", "scripts.checks.gpu.compilation", *map(str, words)]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, cwd=REPO, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    record = json.loads(done.stdout.splitlines()[-1])
    in_use = tiles == used_tiles(setting, shape)
    for name in ("serialised", "local_in_loops"):
        yield Row(name.replace("_", " "), float(record[name]), "", 0.0 if in_use else None)
    for name in ("seconds", "products", "waits", "registers", "spills", "programs_per_multiprocessor"):
        if record[name] is not None:
            yield Row(name.replace("_", " "), float(record[name]))


def main() -> None:
    from dbsp_kernels.triton.forward import triton_attention
    from scripts.checks.machine_code.launches import compiled_launches
    from scripts.checks.machine_code.reading import findings
    from scripts.checks.machine_code.variants import Variant, inputs_of

    *sizes, loop = sys.argv[1:]
    arch, block_q, block_k, *of_tiles = map(int, sizes)
    inputs, tiles = partial(inputs_of, Variant("triton", arch, block_q, block_k)), Tiles(*of_tiles, loop)
    start = time.monotonic()
    (launch,) = compiled_launches(lambda: triton_attention(inputs(), tiles=tiles), arch, "forward_kernel")
    print(json.dumps(findings(launch, arch) | {"seconds": round(time.monotonic() - start, 2)}))


if __name__ == "__main__":
    main()

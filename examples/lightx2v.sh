#!/usr/bin/env bash
# Generates a video with Wan2.1 in LightX2V on 4 GPUs, from a folder of weights. lightx2v.json turns db-SP on.
torchrun --nproc_per_node 4 -m lightx2v.infer --model_cls wan2.1 --task t2v --model_path "${1:?folder of the weights}" \
    --config_json "$(dirname "$0")/lightx2v.json" \
    --prompt "a red ball bounces over a blue checkered floor" --negative_prompt "" --save_result_path video.mp4

#!/usr/bin/env bash
# Generates a video with Wan2.2 in SGLang Diffusion on 4 GPUs, 2 Ulysses × 2 ring ranks. DBSP_CONFIG is a shipped
# configuration, a YAML file or a mask. `sglang serve` takes the same options, without the prompt.
export DBSP_CONFIG=wan2.2-t2v-a14b-subblock
sglang generate --model-path Wan-AI/Wan2.2-T2V-A14B-Diffusers --num-gpus 4 --ulysses-degree 2 --ring-degree 2 \
    --prompt "a red ball bounces over a blue checkered floor" "$@"

#!/usr/bin/env bash
# Serves Wan2.2 with vLLM-Omni on 4 GPUs, 2 Ulysses × 2 ring ranks. DBSP_CONFIG is a shipped configuration, a YAML file
# or a mask.
export DBSP_CONFIG=wan2.2-t2v-a14b-subblock
vllm serve Wan-AI/Wan2.2-T2V-A14B-Diffusers --omni --usp 2 --ring 2 \
    --diffusion-attention-config.per_role.self.backend DBSP "$@"

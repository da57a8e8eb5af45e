#!/usr/bin/env bash
# xDiT's command on 8 GPUs, with the settings shipped for the model. Arguments are appended: --sp-config sparge:cdf=0.92
xdit --model wan2.1-t2v-14b --ulysses_degree 4 --ring_degree 2 --sp-backend dbsp \
    --prompt "a red ball bounces over a blue checkered floor" --output_directory . "$@"

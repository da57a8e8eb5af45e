#!/usr/bin/env bash
# xDiT's own command on 8 GPUs. Arguments go to it after these, such as another --model or --sp-config.
xdit --model wan2.1-t2v-14b --ulysses_degree 4 --ring_degree 2 --sp-backend dbsp --sp-config sparge:cdf=0.92 \
    --prompt "a red ball bounces over a blue checkered floor" --output_directory . "$@"

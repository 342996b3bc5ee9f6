#!/bin/bash
# One machine:       bash torchrun.sh
# Each of several:   MACHINES=2 FIRST=node1:29400 bash torchrun.sh
# FIRST is the name of one of the machines with a free port. When a process fails, all start again, three times at most.
torchrun \
    --nnodes "${MACHINES:-1}" --nproc-per-node "${PROCESSES:-gpu}" --max-restarts 3 \
    --rdzv-backend c10d --rdzv-id digits --rdzv-endpoint "${FIRST:-localhost:0}" \
    train.py --folder "$HOME/runs/digits" "$@"

#!/usr/bin/env bash
# All checks that need a GPU, in one go: about 35 minutes on one card, at most nine a part. A table comes last.
#
#   scripts/gpu_check.sh [REVIEWS]        REVIEWS: aclImdb_v1.tar.gz or its folder; without it, no DistilBERT ladder
#
# Figures go to benchmarks/results/gpu/<date>-<what>.json, or to $OUT where that is set. Nothing is fetched.
# PYTHON names the interpreter (default: python3); the package is taken from src/.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
reviews=${1:-}
out=${OUT:-benchmarks/results/gpu}
stamp=$(date +%F)
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
mkdir -p "$out"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
summary="$work/summary"

check() { # name, seconds allowed, command...
    local name=$1 seconds=$2 begin=$SECONDS code=0
    shift 2
    printf '\n== %s: %s\n' "$name" "$*"
    timeout "$seconds" "$@" || code=$?
    printf '%-28s %-7s %5d s\n' "$name" "$([ $code = 0 ] && echo passed || echo "exit $code")" $((SECONDS - begin)) >>"$summary"
    return $code
}

"$python" - <<'PYTHON' || exit 1
import torch

if not torch.cuda.is_available():
    raise SystemExit("gpu_check: this machine has no CUDA device. Run it where there is one.")
print(torch.cuda.get_device_name(), "| torch", torch.__version__, "| CUDA", torch.version.cuda)
PYTHON
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader || true

# 1, 2: precision, graphs, prefetch, pinned memory, exact resume, NCCL, running out of memory, no synchronisation.
# Only their files: others import what a machine for this need not have.
mapfile -t marked < <(grep -rlE 'mark\.gpu' tests --include='*.py')
check tests 540 "$python" -m pytest -q -m gpu -p no:cacheprovider --continue-on-collection-errors "${marked[@]}"
# 3: what the loop costs a step that is bound by the host.
check overhead 240 "$python" benchmarks/device_overhead.py --json "$out/$stamp-overhead.json"
# What people train, a few steps in each column: the loop of a good engineer beside hasten's lines.
check workloads 540 "$python" -m benchmarks.workloads --quick --json "$out/$stamp-workloads.json" \
    text language resnet vit tabular
# 4, 5: the ladders at full size, with the share of the card's peak.
ladder() { # name, arguments...
    local name=$1
    shift
    check "ladder $name" 540 "$python" -m hasten demo --accelerator gpu --output "$work/$name" "$@"
    # Written after each row: one that was cut short has left what it had.
    for ending in json csv png; do
        for file in "$work/$name"/*."$ending"; do
            [ -e "$file" ] && cp "$file" "$out/$stamp-$name.$ending"
        done
    done
}
ladder vit --task vit --random-images --limit 12000 --epochs 1 --row-seconds 25 --rounds 2
if [ -n "$reviews" ]; then
    ladder distilbert --task imdb --model distilbert --random-weights --data "$reviews" --cache-dir "$work/cache" \
        --epochs 1 --row-seconds 8 --rounds 2
fi

printf '\n%s\n' "--------------------------------------------"
cat "$summary"
! grep -q 'exit ' "$summary"

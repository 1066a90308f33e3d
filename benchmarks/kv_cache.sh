#!/usr/bin/env bash
# The rows of benchmark_results.csv, all of them: docs/kv-cache.md draws and explains these.
#
#   benchmarks/kv_cache.sh [OUTPUT.csv]       over two hours on two cores, most of it without a cache
#   make benchmark                            the same, after installing what it needs
#
# It can be stopped and started again: points that the CSV has already are left out (--resume). Nothing else
# should run on the machine meanwhile. Environment: PYTHON (python3), THREADS (all that this process may use).
set -euo pipefail
cd "$(dirname "$0")/.."

output=${1:-benchmark_results.csv}
run() { "${PYTHON:-python3}" benchmark.py --output "$output" --resume ${THREADS:+--threads "$THREADS"} "$@"; }

# One request, the short prompt. Without a cache, 300 tokens and more take a minute and more: one run, no warm-up.
# (Where many rows are measured, the others run twice.)
once=(--baseline-warmup-runs 0 --baseline-timed-runs 1)
twice=(--timed-runs 2 "${once[@]}")
run --label lengths --new-tokens 30 50 100
run --label lengths --new-tokens 200 --block-size 8 16 32
run --label lengths --new-tokens 500 --block-size 8 16 32 "${once[@]}"
run --label lengths --new-tokens 300 400 800 "${once[@]}"

# What paging costs the native executor, which reads the blocks where they lie.
run --label native --executor native --modes kv_cache_no_paging kv_cache --new-tokens 200 500

# bfloat16 weights and cache, the baseline's too.
run --label bfloat16 --dtype bfloat16 --modes no_kv_cache kv_cache_native --new-tokens 50 200
run --label bfloat16 --dtype bfloat16 --modes no_kv_cache kv_cache_native --new-tokens 500 "${once[@]}"

# A longer prompt.
run --label prompts --prompt-tokens 256 --new-tokens 30 50 100 200 300 400 500 "${twice[@]}"

# Many requests at once; and what it takes to reserve the model's context for each of them. 16 × 500 tokens take the
# baseline 40 minutes, the torch executor one: all run once.
for new_tokens in 200 500; do
    if [ "$new_tokens" = 200 ]; then runs=("${twice[@]}"); else runs=(--warmup-runs 0 --timed-runs 1); fi
    for concurrency in 4 16; do
        many=(--concurrency "$concurrency" --new-tokens "$new_tokens" --total-blocks 528)
        run --label reserved "${many[@]}" --executor native --modes kv_cache_no_paging kv_cache \
            --non-paged-block-size 0 1024 --timed-runs 1
        run --label concurrency "${many[@]}" "${runs[@]}"
    done
done

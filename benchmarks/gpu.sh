#!/usr/bin/env bash
# Measures training on a machine with a GPU, in ten to fifteen minutes, alone on the
# machine.
#
#     bash benchmarks/gpu.sh FOLDER [NAME...]
#
# FOLDER gets NAME.json and NAME.txt of each measurement, or only of those named, see
# throughput.py, and table.txt. PYTHON names the Python, WARM_UP and SECONDS_EACH are the
# seconds before each measurement and of it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=${1:?name a folder for the results}
only=" ${*:2} "
python=${PYTHON:-python}
mkdir -p "$out"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} # it may not be installed
actors=$(($(nproc) > 3 ? $(nproc) - 2 : 2)) # two cores are for the learner's threads
each=${SECONDS_EACH:-15}
failed=0

# measure NAME VARIANT MODEL FLAG...
measure() {
    local name=$1 variant=$2 model=$3
    shift 3
    [[ $only == "  " || $only == *" $name "* ]] || return 0
    local warm_up=${WARM_UP:-10}
    [[ $* != *--compile* ]] || warm_up=40 # inference compiles for each size of a batch
    echo "== $name"
    local status=0
    # Up to two minutes until the first update, and half a minute to end.
    timeout $((each + warm_up + 200)) "$python" benchmarks/throughput.py --variants "$variant" \
        --model "$model" --seconds "$each" --warm_up "$warm_up" --part_seconds 0 \
        --precisions bf16 --json "$out/$name.json" -- --num_actors "$actors" \
        --envs_per_actor 16 --batch_size 32 "$@" \
        >"$out/$name.txt" 2>&1 || status=$?
    if ((status == 0)); then
        sed -nE "s/^(SPS|learner, CPU|cores used|Who waited)/$name: &/p" "$out/$name.txt" |
            tail -n 4 | tee -a "$out/table.txt"
    else
        failed=1
        { echo "failed with status $status (124: out of time)"; tail -n 3 "$out/$name.txt"; } |
            sed "s/^/$name: /" | tee -a "$out/table.txt"
    fi
}

: >"$out/table.txt"
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>&1 |
    tee -a "$out/table.txt" || true
measure mono_shallow monobeast shallow
measure mono_shallow_buffers monobeast shallow --num_buffers $((actors * 32))
measure mono_shallow_two_threads monobeast shallow --num_learner_threads 2
measure mono_shallow_compile monobeast shallow --compile default
measure mono_shallow_graphs monobeast shallow --compile reduce-overhead
measure mono_deep monobeast deep
measure poly_shallow polybeast shallow
measure poly_shallow_two_threads polybeast shallow --num_inference_threads 2
measure poly_shallow_compile polybeast shallow --compile default
measure poly_deep polybeast deep
measure poly_deep_graphs polybeast deep --compile reduce-overhead
measure poly_lstm polybeast deep --use_lstm
cat "$out/table.txt"
exit "$failed"

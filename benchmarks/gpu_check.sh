#!/usr/bin/env bash
# Everything that needs one GPU, in one call: benchmarks/gpu_check.sh OUT_DIR
#
# For a bare machine with a Hopper GPU, nvcc and torch, and no network. Kernels are taken from
# flux/lib/kernels (make kernels, on any machine), or built if CUTLASS is there. Most important first;
# each step has its time, and leaves its log and results in OUT_DIR even when a later one fails.
set -uo pipefail
out=$(realpath -m "${1:?usage: benchmarks/gpu_check.sh OUT_DIR}")
cd "$(dirname "${BASH_SOURCE[0]}")/.."
mkdir -p "$out"
export PYTHONPATH="$PWD" PYTHONUNBUFFERED=1 CUDA_DEVICE_MAX_CONNECTIONS=32
python=${PYTHON:-python3}
failed=()
total=${FLUX_GPU_CHECK_S:-530} # seconds for everything: what comes last is cut short

step() { # name, seconds, command...
  local name=$1 limit=$2 begin=$SECONDS status=0
  shift 2
  ((limit <= total - SECONDS)) || limit=$((total - SECONDS))
  if ((limit < 5)); then
    echo "--- $name: no time left" | tee -a "$out/summary.txt"
    failed+=("$name")
    return
  fi
  echo "=== $name"
  timeout --kill-after=10 "$limit" "$@" > "$out/$name.log" 2>&1 || status=$?
  tail -n 12 "$out/$name.log"
  echo "--- $name: status $status, $((SECONDS - begin)) s" | tee -a "$out/summary.txt"
  ((status == 0)) || failed+=("$name")
}

# The machine may lack plugins that pyproject.toml configures.
tests=("$python" -m pytest -q -o addopts= -p no:cacheprovider tests/test_gpu.py)

# flux._C, with the pybind11 that torch brings: CMake and pip want packages that may not be here.
build_native() {
  local headers object
  headers="-I csrc $("$python" -c 'import sysconfig, pathlib, torch
print("-I", sysconfig.get_paths()["include"], "-I", pathlib.Path(torch.__file__).parent / "include")')"
  mkdir -p build/gpu-check
  # shellcheck disable=SC2086
  printf '%s\n' csrc/host/*.cpp | xargs -P 8 -I{} sh -c 'g++ -std=c++17 -O2 -fPIC -fvisibility=hidden \
    -DFLUX_VERSION=\"gpu-check\" '"$headers"' -c {} -o build/gpu-check/$(basename {}).o' || return
  object=flux/_C$("$python" -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')
  g++ -shared build/gpu-check/*.o -o "$object" -lpthread -ldl -lrt && "$python" -c 'import flux'
}

build_kernels() {
  "$python" tools/compile_kernels.py --set minimal --arch 90a,80 --out flux/lib/kernels
}

# Kernels of a trace build come with the others (make kernels ARGS=--trace), or are built here.
build_trace_kernels() {
  "$python" tools/compile_kernels.py --trace --set minimal --arch 90a --out flux/lib/kernels
}

# All ranks on the GPU, then one whose peers are played: what a multiprocessor does while it waits.
trace_ops() {
  local op
  for op in ag_gemm gemm_rs gemm_ar; do
    "$python" -m flux trace op --op "$op" --transport virtual --nproc 4 --m 4096 --n 8192 --k 4096 \
      --calls 2 --out "$out/trace_virtual_$op.json" || return
    "$python" -m flux trace op --op "$op" --transport loopback --nproc 4 --m 4096 --n 8192 --k 4096 \
      --calls 2 --out "$out/trace_loopback_$op.json" || return
  done
}

# Tuning is between GPUs. A small space: one kernel that is built, and one to be compiled, if it can be.
tune_briefly() {
  local gpus op
  gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
  if ((gpus < 2)); then
    echo "skipped: $gpus GPU, and one rank has nothing to tune"
    return
  fi
  export FLUX_TUNE_CACHE="$out/tune" FLUX_KERNEL_CACHE="$out/kernels"
  cat > "$out/tune_space.toml" << 'END'
backend = "cuda"
arch = "90a"
prune_above = 10
[ag_gemm]
comm_tile_rows = ["chunk", "chunk/2", "chunk/4"]
direction = ["push", "pull"]
[gemm_rs]
swizzle = ["rank_shift", "xor"]
[kernel]
tile = [[128, 256, 64], [256, 128, 64]]
schedule = ["cooperative"]
cluster = [[2, 1]]
END
  for op in ag_gemm gemm_rs; do
    "$python" -m flux tune --backend cuda --op "$op" --m 2048 --n 8192 --k 8192 --nproc $((gpus > 8 ? 8 : gpus)) \
      --space "$out/tune_space.toml" --budget 100s --json > "$out/tune_$op.json" || return
  done
  "$python" -m flux tune show
}

nvidia-smi > "$out/nvidia-smi.txt" 2>&1
export -f build_native build_kernels build_trace_kernels trace_ops tune_briefly
export python out
step native 120 bash -c build_native
compgen -G 'flux/lib/kernels/*/*.so' > /dev/null || step kernels 400 bash -c build_kernels
step test_small 60 "${tests[@]}" -x -k "small or plain"
step test_gpu 120 "${tests[@]}"
step kernels_bench 110 "$python" benchmarks/gpu_kernels.py --json "$out/kernels.json"
step loopback_bench 120 "$python" benchmarks/gpu_loopback.py "$out/loopback.json"
compgen -G 'flux/lib/kernels/*_traced_*/*.so' > /dev/null ||
  step trace_kernels 200 bash -c build_trace_kernels
step trace 90 bash -c trace_ops
step memcheck 60 compute-sanitizer --tool memcheck --error-exitcode 1 \
  "${tests[@]}" -k small
step test_loopback 60 "${tests[@]/test_gpu/test_gpu_loopback}"
step test_processes 90 "${tests[@]/test_gpu/test_gpu_processes}"
step test_graphs 60 "${tests[@]/test_gpu/test_gpu_graphs}"
step test_interop 60 "${tests[@]/test_gpu/test_gpu_interop}"
step test_bench 60 "${tests[@]/test_gpu/test_gpu_bench}"
step tune 240 bash -c tune_briefly
step fp8_bench 60 "$python" benchmarks/gpu_kernels.py --dtype e4m3 --rows 8192 64 \
  --json "$out/kernels_e4m3.json"
step racecheck 60 compute-sanitizer --tool racecheck --error-exitcode 1 \
  "${tests[@]}" -k "small and ag_gemm"
FLUX_TEST_CASES=85 step many_cases 200 "${tests[@]}" -k random

echo "failed: ${failed[*]:-none}" | tee -a "$out/summary.txt"
((${#failed[@]} == 0))

#!/usr/bin/env bash
# Everything that needs one GPU: benchmarks/gpu_check.sh WORK_DIR [--again] [STEP...]
#
# For a bare machine with a Hopper GPU, nvcc and torch, and no network. Kernels are taken from
# flux/lib/kernels (make kernels, on any machine), or built if CUTLASS is there. Most important first.
#
# WORK_DIR gets logs, JSON, and state/STEP with the exit status of each step that ended by itself. Run the
# same command again to go on: steps in state/ are skipped, unless --again is given, and one that was cut
# short begins where its JSON ends. On another machine, copy WORK_DIR there, but for state/environment and
# state/*native and *kernels, which each machine needs by itself.
#
#   FLUX_GPU_CHECK_S   seconds for this command (530): a step that would outlast them is cut short
#   PYTHON, NVCC       python3, nvcc
set -uo pipefail
usage="usage: benchmarks/gpu_check.sh WORK_DIR [--again] [STEP...]"
again=0
out=
only=()
for argument in "$@"; do
  case $argument in
    --again) again=1 ;;
    -*) echo "$usage" >&2 && exit 2 ;;
    *) if [[ $out ]]; then only+=("$argument"); else out=$(realpath -m "$argument"); fi ;;
  esac
done
: "${out:?$usage}"
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
mkdir -p "$out/state"
# What is loaded while a kernel spins would wait for that kernel.
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export CUDA_DEVICE_MAX_CONNECTIONS=32 CUDA_MODULE_LOADING=EAGER
python=${PYTHON:-python3}
nvcc=${NVCC:-nvcc}
total=${FLUX_GPU_CHECK_S:-530}
failed=()

note() { echo "--- $*" | tee -a "$out/summary.txt"; }

wanted() {
  ((${#only[@]})) || return 0
  local name
  for name in "${only[@]}"; do [[ $name == "$1" ]] && return 0; done
  return 1
}

step() { # name, seconds, command...
  local name=$1 limit=$2 begin=$SECONDS status=0
  shift 2
  wanted "$name" || return 0
  if ((!again)) && [[ -e $out/state/$name ]]; then
    status=$(< "$out/state/$name")
    echo "=== $name: done before, status $status"
    ((status == 0)) || failed+=("$name")
    return 0
  fi
  ((limit <= total - SECONDS)) || limit=$((total - SECONDS))
  if ((limit < 5)); then
    note "$name: no time left"
    failed+=("$name")
    return 0
  fi
  echo "=== $name"
  # Interrupted, tests say what has failed so far.
  timeout --signal=INT --kill-after=10 "$limit" "$@" >> "$out/$name.log" 2>&1 || status=$?
  tail -n 12 "$out/$name.log"
  if ((status == 124 || status == 137)); then
    note "$name: cut short after $((SECONDS - begin)) s; run the command again to go on"
  else
    note "$name: status $status, $((SECONDS - begin)) s"
    echo "$status" > "$out/state/$name"
  fi
  ((status == 0)) || failed+=("$name")
}

# Tests want pytest, and some of them other packages, which a bare machine may lack. No plugin that
# pyproject.toml configures is needed. Status 5 of pytest: no test has such a name.
test_step() { # name, seconds, file, options...
  local name=$1 limit=$2 file=$3 module
  shift 3
  wanted "$name" || return 0
  if [[ ! -e $file ]]; then
    note "$name: skipped, there is no $file"
    return 0
  fi
  for module in pytest $(sed -nE 's/^(import|from) (hypothesis|psutil).*/\2/p' "$file" | sort -u); do
    if ! "$python" -c "import $module" 2> /dev/null; then
      note "$name: skipped, there is no $module"
      return 0
    fi
  done
  work "$name" "$limit" run_tests "$file" "$@"
}

run_tests() {
  local status=0
  "$python" -m pytest -q -o addopts= -p no:cacheprovider -m gpu "$@" || status=$?
  ((status == 5)) && echo "no such test" && return 0
  return "$status"
}

environment() {
  nvidia-smi || return
  "$nvcc" --version || return
  "$python" -c 'import sys, torch
print(sys.version, torch.__version__, torch.version.cuda, torch.cuda.get_device_name(0),
      torch.cuda.get_device_capability(0), torch.cuda.get_device_properties(0))'
}

# What TMA does with rows outside of a tensor map. Negative rows may be anything: they are only said.
# And whether it stores into pinned memory of the host, on which loopback relies.
tma_store() {
  local row add
  "$nvcc" -std=c++17 -gencode=arch=compute_90a,code=sm_90a benchmarks/gpu_tma_store.cu \
    -o "$out/tma_store" || return
  for row in -5 -200; do
    for add in 0 1; do "$out/tma_store" "$row" "$add" || echo "  status $?"; done
  done
  "$out/tma_store" || return
  "$out/tma_store" host
}

# flux._C and the PTX machine, which tests import, with the pybind11 that torch brings: CMake and pip
# want packages that may not be here. The PTX machine executes nothing here, and is not optimised.
# The command `flux` finds its commands in the metadata. Modules built for this Python elsewhere are
# taken as they are.
build_native() {
  "$python" setup.py -q egg_info || return
  "$python" -c 'import ptx_machine; from flux import _C' 2> /dev/null && return
  build_module flux/_C csrc -std=c++17 -O2 '-DFLUX_VERSION="gpu-check"' \
    csrc/{schedule,plan,cpu,cuda_host,bindings}/*.cpp &&
    build_module ptx_machine/_machine ptx_machine -std=c++20 -O0 -ffp-contract=off \
      ptx_machine/src/*.cpp &&
    "$python" -c 'import ptx_machine; from flux import _C'
}

build_module() { # module, folder of headers, options and sources...
  local module=$1 objects=build/gpu-native/$1 argument options=() sources=() paths
  paths=$("$python" -c 'import sysconfig, pathlib, torch
print(sysconfig.get_paths()["include"], pathlib.Path(torch.__file__).parent / "include",
      sysconfig.get_config_var("EXT_SUFFIX"))') || return
  read -ra paths <<< "$paths"
  options=(-fPIC -fvisibility=hidden -I "$2" -I "${paths[0]}" -I "${paths[1]}")
  shift 2
  for argument in "$@"; do
    if [[ $argument == -* ]]; then options+=("$argument"); else sources+=("$argument"); fi
  done
  mkdir -p "$objects"
  # shellcheck disable=SC2016
  printf '%s\n' "${sources[@]}" | xargs -P "$(nproc)" -I{} sh -c \
    'objects=$1 source=$2 && shift 2 && g++ "$@" -c "$source" -o "$objects/$(echo "$source" | tr / _).o"' \
    sh "$objects" {} "${options[@]}" || return
  g++ -shared "$objects"/*.o -o "$module${paths[2]}" -lpthread -ldl -lrt
}

build_kernels() {
  "$python" tools/compile_kernels.py --set minimal --arch 90a,80 --out flux/lib/kernels
}

# Kernels whose blocks claim their tiles are in the set default.
schedulers_bench() {
  if ! grep -qs '"dynamic"' flux/lib/kernels/*/*.json; then
    echo "skipped: no kernel with a dynamic tile scheduler is built (make kernels SET=default)"
    return
  fi
  "$python" benchmarks/gpu_schedulers.py "$out/tile_scheduler.json"
}

# Kernels of a trace build come with the others (make kernels ARGS=--trace), or are built here.
build_trace_kernels() {
  "$python" tools/compile_kernels.py --trace --set minimal --arch 90a --out flux/lib/kernels
}

# Results of 8 ranks on one GPU against float64; their times mean nothing.
virtual_ops() {
  local op
  for op in ag_gemm gemm_rs gemm_ar; do
    [[ -e $out/virtual_$op.json ]] && continue
    "$python" -m flux bench op --backend cuda --transport virtual --op "$op" --nproc 8 --dtype bfloat16 \
      --m 2048 --n 8192 --k 4096 --repeats 3 --json "$out/virtual_$op.json" || return
  done
}

# Few rows, whose kernels push them, or end the AllReduce.
in_kernel_ops() {
  local op m
  for op in ag_gemm gemm_ar; do
    for m in 16 512; do
      [[ -e $out/in_kernel_${op}_$m.json ]] && continue
      "$python" -m flux bench op --backend cuda --transport virtual --op "$op" --nproc 8 --dtype bfloat16 \
        --path in_kernel --m "$m" --n 8192 --k 4096 --repeats 3 --json "$out/in_kernel_${op}_$m.json" || return
    done
  done
}

# All ranks on the GPU, then one whose peers are played: what a multiprocessor does while it waits.
trace_ops() {
  local op transport target
  for op in ag_gemm gemm_rs gemm_ar; do
    for transport in virtual loopback; do
      target=$out/trace_${transport}_$op.json
      [[ -e $target ]] && continue
      "$python" -m flux trace op --op "$op" --transport "$transport" --nproc 4 --m 4096 --n 8192 --k 4096 \
        --calls 2 --out "$target" || return
    done
  done
  for op in ag_grouped_gemm grouped_gemm_rs dispatch_grouped_gemm,ep=2 grouped_gemm_combine,ep=2; do
    target=$out/trace_virtual_${op%,*}.json
    [[ -e $target ]] && continue
    "$python" -m flux trace op --op "${op%,*}" --transport virtual --nproc 2 --m 4096 --n 2048 --k 1536 \
      --sizes "experts=64,topk=8${op#"${op%,*}"}" --calls 2 --out "$target" || return
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
raster = [1, 8]
[gemm_rs]
swizzle = ["rank_shift", "xor"]
raster = [1, 8]
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

sanitize() { # tool, pytest options...
  local tool=$1
  shift
  command -v compute-sanitizer > /dev/null || { echo "skipped: there is no compute-sanitizer" && return 0; }
  compute-sanitizer --tool "$tool" --error-exitcode 1 \
    "$python" -m pytest -q -o addopts= -p no:cacheprovider -m gpu tests/gpu/test_gpu.py "$@"
}

kernels_bench() { "$python" benchmarks/gpu_kernels.py --json "$out/kernels.json" "$@"; }
grouped_bench() { "$python" benchmarks/gpu_grouped.py "$out/grouped.json" "$@"; }
loopback_bench() { "$python" benchmarks/gpu_loopback.py "$out/loopback.json" "$@"; }

# timeout runs commands, not functions: a bash that has them.
functions=(environment tma_store build_native build_module build_kernels build_trace_kernels schedulers_bench
  virtual_ops in_kernel_ops trace_ops tune_briefly sanitize kernels_bench grouped_bench loopback_bench run_tests)
export -f "${functions[@]}"
export python nvcc out
work() { # name, seconds, function, arguments...
  local name=$1 limit=$2
  shift 2
  step "$name" "$limit" bash -c '"$@"' bash "$@"
}

echo "# $(date -u +%FT%TZ), $total s" >> "$out/summary.txt"
work environment 60 environment
work tma_store 60 tma_store
work native 120 build_native
compgen -G 'flux/lib/kernels/*/*.so' > /dev/null || work kernels 400 build_kernels
work plain 60 "$python" benchmarks/gpu_kernels.py --plain
work streams 60 "$python" benchmarks/gpu_streams.py "$out/streams.json"
test_step test_small 60 tests/gpu/test_gpu.py -x -k "small or plain"
test_step test_regressions 90 tests/gpu/test_gpu.py -k "regression"
test_step test_gpu 120 tests/gpu/test_gpu.py -k "not small and not regression"
test_step test_grouped 60 tests/gpu/test_gpu_grouped.py
test_step test_ulysses 60 tests/gpu/test_gpu_ulysses.py
test_step test_kernels 120 tests/gpu/test_gpu_kernels.py
work in_kernel 90 in_kernel_ops
work kernels_small 90 kernels_bench --rows 64 128 256 512
work kernels_large 110 kernels_bench --rows 8192 4096 2048 1024
work schedulers 60 schedulers_bench
work grouped 60 grouped_bench
work calibration 90 "$python" -m flux.plan.command_calibrate --device cuda --out "$out/calibration.json"
work loopback 120 loopback_bench --rows 8192 4096
work virtual 120 virtual_ops
work fp8 60 "$python" benchmarks/gpu_kernels.py --dtype e4m3 --rows 8192 64 --json "$out/kernels_e4m3.json"
test_step test_loopback 60 tests/gpu/test_gpu_loopback.py
work memcheck 90 sanitize memcheck -k small
work racecheck 90 sanitize racecheck -k "small and ag_gemm"
test_step test_graphs 60 tests/gpu/test_gpu_graphs.py
test_step test_processes 90 tests/gpu/test_gpu_processes.py
test_step test_interop 60 tests/gpu/test_gpu_interop.py
test_step test_layers 90 tests/gpu/test_gpu_layers.py
test_step test_bench 90 tests/bench/test_gpu_bench.py
work tune 240 tune_briefly
compgen -G 'flux/lib/kernels/*_traced_*/*.so' > /dev/null || work trace_kernels 200 build_trace_kernels
work trace 120 trace_ops
FLUX_TEST_CASES=85 test_step many_cases 200 tests/gpu/test_gpu.py -k random

note "failed: ${failed[*]:-none}"
((${#failed[@]} == 0))

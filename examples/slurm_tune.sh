#!/bin/bash
# Tunes a model's shapes on two hosts, one rank per core that is to be used; then exports the winners.
#
#   sbatch examples/slurm_tune.sh llama3-70b
#
# A job that is ended by its time limit goes on where it was when it is submitted again: the journal
# is in FLUX_TUNE_CACHE, which must be on a file system that all hosts see and that honours flock.
#SBATCH --job-name=flux-tune
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --time=01:00:00
#SBATCH --output=flux-tune-%j.log

set -euo pipefail

shapes=${1:?usage: sbatch examples/slurm_tune.sh SHAPES [RANKS_PER_NODE]}
ranks_per_node=${2:-4}
export FLUX_TUNE_CACHE=${FLUX_TUNE_CACHE:-$HOME/.cache/flux/tune}
# torchrun sets this to 1 if it is not set; `flux tune --threads` says how many GEMM threads a rank has.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# A port of this job's own: two jobs may share a host's name, but not its number.
port=$((20000 + SLURM_JOB_ID % 20000))

# Ten minutes less than the job has, so that the last winner is written before the limit.
srun torchrun \
  --nnodes "$SLURM_NNODES" \
  --nproc-per-node "$ranks_per_node" \
  --rdzv-backend c10d \
  --rdzv-endpoint "$head:$port" \
  --rdzv-id "$SLURM_JOB_ID" \
  -m -- flux tune --shapes "$shapes" --threads "$OMP_NUM_THREADS" --budget 50m

python -m flux tune export "flux-winners-$SLURM_JOB_ID.json"

#!/bin/bash
#SBATCH --job-name=digits
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --time=01:00:00
#SBATCH --requeue
# Two minutes for a checkpoint, and for the bridge to send the rest.
#SBATCH --signal=TERM@120
#
# A training on the job's hosts: OFFLOOP_STREAM=nats://HOST:4222 sbatch slurm.sh. One torchrun runs on each host, whose
# ranks start the host's broker and bridge. A job that is put back resumes from its checkpoint.
set -eu
export RUN=${RUN:-digits}
export RANKS=${RANKS:-2} # of each host: with GPUs, as many as it has
export OFFLOOP_STREAM=${OFFLOOP_STREAM:?where NATS is: nats://HOST:4222}
MASTER=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER PORT=$((29500 + SLURM_JOB_ID % 1000))

# Each host has a folder of its own, and with it a name that stays when the job gets other machines. The file system has
# to take locks and Unix sockets, and the path of the folder at most 80 bytes.
srun bash -c '
    trap : TERM # it is the training that ends; this waits for it
    export OFFLOOP_HOST=host-$SLURM_NODEID OFFLOOP_RUNS_DIR=$PWD/runs/host-$SLURM_NODEID
    torchrun --nnodes="$SLURM_NNODES" --node-rank="$SLURM_NODEID" --nproc-per-node="$RANKS" \
        --master-addr="$MASTER" --master-port="$PORT" \
        -m offloop.trainer digits --max-duration 100ep --run-name "$RUN" \
        --save-folder "checkpoints/{run_name}" --keep 3 --autoresume
    code=$?
    timeout 90 offloop server bridge "$RUN" || echo "run $RUN is not all in NATS: send the rest by hand" >&2
    exit $code
'

#!/bin/sh
#SBATCH --job-name=jaxllm
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
# One model over two nodes, a process each with all of its GPUs. Process 0, on the first node, answers at port 8000.
# --kill-on-bad-exit: where one process ends, all do; the loop starts them again.
# The secret is a file in the home folder, which the nodes share; otherwise export JAXLLM_CLUSTER_SECRET here.
until srun --kill-on-bad-exit=1 jaxllm serve "${1:-meta-llama/Llama-3.1-70B-Instruct}" \
    --tensor-parallel-size 16 --host 0.0.0.0 --api-key "$JAXLLM_API_KEY"
do
    sleep 5
done

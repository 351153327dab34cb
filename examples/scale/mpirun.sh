#!/bin/sh
# One model over two processes of this machine, with Open MPI. Process 0 answers at http://127.0.0.1:8000/v1.
# --bind-to none: Open MPI would give each of them one core.
exec mpirun -n 2 --bind-to none jaxllm serve "${1:-gemma3-270m}" --tensor-parallel-size 2

"""One question per file; run with `python -m benchmarks.<name> [--small] [--json PATH]`.

`pip install -e '.[benchmarks]'` installs the peers and matplotlib. `_sides.py` says how to get upstream jaxamp, which
has the same name as this package. PyTorch takes part if it is installed and finds a GPU. To run everything and write
RESULTS.md:

    python -m benchmarks.train_step --json results/train_step.json
    python -m benchmarks.zoo --json results/zoo.json
    python -m benchmarks.passes --json results/passes.json
    python -m benchmarks.kernels --json results/kernels.json
    python -m benchmarks.memory --json results/memory.json
    python -m benchmarks.growth --json results/growth.json
    python -m benchmarks.matmul --json results/matmul.json
    python -m benchmarks.communication --json results/communication.json
    python -m benchmarks.compile_time --json results/compile_time.json
    python -m benchmarks.scaler --json results/scaler.json
    python -m benchmarks.optimizer --json results/optimizer.json
    python -m benchmarks.step_length --json results/step_length.json
    python -m benchmarks.report_time --json results/report_time.json
    python -m benchmarks.write_results results
"""

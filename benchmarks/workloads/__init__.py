"""Six trainings that people really do, each to a stated quality: ``python -m benchmarks.workloads``.

It runs from the root of the repository. ``--help`` names the workloads and the options; docs are in
``benchmarks/README.md``.
"""

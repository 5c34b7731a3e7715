"""Model parallelism: blocks, the stages that compilation records, their placement on IPUs, and its limits."""

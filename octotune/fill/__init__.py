"""Fill jobs: independent work inside the bubbles that a plan leaves.

`jobs` are the jobs as values and files, `models` ready ones made from published shapes, `bubbles`
what a plan leaves on each device, `state` the main job's optimizer state away on the host,
`packing` which micro-steps run in which bubble, `rates` what that makes, `policies` who gets a
free device. `plan` is all of it in one file, which `make` makes and `check` recomputes. `traces`
and `fleet` are days of many replicas, and `commands` the command line.

Source:
    Arfeen et al. 2024, "PipeFill: Using GPUs During Bubbles in Pipeline-parallel LLM Training",
    arXiv:2410.07192.
"""

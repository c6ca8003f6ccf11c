"""Fill: other jobs in the waits of a pipeline, real.

    run           a rank's fill work, beside its pipeline; `command` gives it options
    instructions  which waits of the plan are bubbles; `lengths`, `confirm` measure them
    task          what a fill job is; `module` makes one of an nn.Module, cut by `pieces`
    work          runs micro-steps before a deadline; `child` does so in a process of its own
    queue         whose turn it is on a device; `moves` hands jobs on; `state` makes room for them
    profile       what a job takes alone; `report` what it did

PipeFill (MLSys'25), sections 4 and 5.
"""

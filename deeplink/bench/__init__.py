"""Benchmarks of this machine: every figure beside its mark from the same run.

    run        the families of rows, each in a process of its own; families  which there are; child  such a process
    rows       the form of a result; saving  its files; plot  its picture
    marks      what the machine can do; timing  figures and marks in turns; scale  how much is measured

The families, and what they measure with:

    relayout   re-layout and digest; packings  vLLM's own caches
    loopback   blocks to blocks on one host; libraries  pushes by one-sided libraries; builtin  vLLM's own connector
    ranks      unequal tensor parallelism
    links      handoffs over slow and lossy links; netlink  such links
    engine     an engine that is only its cache; memory  that cache
    handoff    whole handoffs; stages  where their time goes
"""

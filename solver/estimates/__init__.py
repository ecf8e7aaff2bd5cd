"""How long a step takes and what a model needs, each number with its source and how wrong it may be.

rates      the best time there is for a phase, of those below
model      what a model costs, from its config
roofline   the least time, and the likely one, from a chip's peaks
calibrate  which part of its peaks a chip reaches
surface    between measured times
table      measured times as a file
importers  those of other projects: aiconfigurator, vidur; kernels  times of single kernels, put together
catalogue  the chips and models that come along
"""

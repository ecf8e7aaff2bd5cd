"""Which chip does what: measurements and an inventory in, a proven placement out.

    place        a fleet in, its placement out: the way through all of this
    placement    the document that comes out
    predict      what it should do, and how far its workload may move
    verify       whether it does, in the simulator; if not, less busy engines
    sensitivity  which number, if measured, would change the answer
    replan       the cheapest step when things are no longer as planned; running  engines apart from plans
    report       a placement for people; plots  in pictures

What these are made of (import-linter holds who may know whom):

    emit       a placement as what starts it
    simulator  requests through it, event by event
    fleets     what is there, what is asked, every way to use it
    exact      the problem as numbers, and its proof
    estimates  how long steps take, what a model needs
    kinds      of engines: which there are, and what each can do

`data` has what others measured and published; SOURCES.md says whose it is.
"""

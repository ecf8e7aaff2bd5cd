"""What is there, what is asked of it, and every way to use it: from fleet.toml to the problem that is solved.

fleetfile   fleet.toml, checked once; sections  its sections; lines  where a field stands
fleet       its checked form
tables      the tables of times it names
trace       recorded requests; traffic  requests to try a placement with
configure   every way to run an engine on every pool
spanning    which groups of chips those may be
served      which engines of its kind a pool can have
handoffs    which pools can hand over to which
candidates  all of it as a problem
"""

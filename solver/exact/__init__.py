"""The placement problem as numbers and its proven answer: no chips, no files, no clocks.

problem   pools, candidates, requests, routes, links, scenarios
queueing  how busy an engine may be; replayed  the same from a recorded trace
program   the problem as a mixed-integer program
highs     the library that solves it, which nothing else knows
warm      where the search starts
solve     the best answer with its bound, or what is missing
relax     the smallest change with which there would be one
pareto    what more of the rate costs
"""

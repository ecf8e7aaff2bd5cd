"""Whether a vendor's operators mean what their protocols say.

precision   how far a result may be from the exact one, by element type, and where that comes from
exact       every operator in float64, in numpy, from its formula: shares no code with any vendor; `exact_attention`
            is attention's
case        one call, its exact results, and what makes it pass
inputs      the numbers that cases are made of; `paged` the caches
*_cases     the cases (attention, cache, elementwise, expert, matmul, norm): shapes, element types, edges
suite       all of them
run         a vendor through the suite
rows        what came of it, in rows: passed, failed, unsupported, untested; `report` them
command     `deeplink conform`
"""

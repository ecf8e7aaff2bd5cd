from __future__ import annotations

import sweep


def test_handing_over_stops_where_it_should() -> None:
    answers = [sweep.splits(rate) for rate in sweep.RATES]
    assert all(solved == tried for solved, tried in answers), answers
    assert answers[0] == (True, True)
    assert answers[-1] == (False, False)

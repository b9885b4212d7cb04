"""The pure parts of the benchmarks: ratios, verdicts, and their presentation."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
from benchmarks import neighbours_page
from benchmarks.bars import BARS, BEST, Bar, least, most, verdict
from benchmarks.board import Board, Tally
from benchmarks.contenders import OURS, RAW
from benchmarks.engines import LogPosition
from benchmarks.noise import ALONE
from benchmarks.page import render
from benchmarks.place import QUICK
from benchmarks.plan import NEIGHBOURS, RESULTS, WORKLOADS, chosen, rows_of
from benchmarks.plot import draw
from benchmarks.report import lines
from benchmarks.results import Results
from benchmarks.suite import Suite


def results(store: str = "postgres", **figures: dict[str, list[float]]) -> Results:
    filled = Results(store)
    filled.add({row.replace("_", " "): series for row, series in figures.items()})
    return filled


@pytest.mark.parametrize(
    ("ratio", "bar", "said"),
    [
        (0.81, least(0.8), "reached"),
        (0.76, least(0.8), "tie (5%)"),
        (0.4, least(0.8), "missed by 50%"),
        (0.5, Bar(1.0, "graphile", aim=True), "short by 50%"),
        (0.5, most(1.0), "reached"),
        (1.05, most(1.0), "tie (5%)"),
        (2.0, most(1.0), "missed by 100%"),
        (0.0, most(1.0), "reached"),
        (0.0, most(0.0), "reached"),
        (0.5, most(0.0), "missed"),
    ],
)
def test_a_verdict_says_by_how_much_a_bar_is_missed(ratio: float, bar: Bar, said: str) -> None:
    assert verdict(ratio, bar) == said


def test_a_ratio_is_the_median_of_the_rounds_and_not_the_ratio_of_medians() -> None:
    # The rounds give 2, 0.5 and 13; the medians of the figures alone would give 10 to 3.
    measured = results(S4={OURS: [2, 10, 40], RAW: [1, 20, 3]})
    assert measured.ratio("S4", RAW) == 2
    assert measured.figure("S4") == 10


def test_the_best_peer_is_chosen_anew_in_every_round() -> None:
    measured = results(S8={OURS: [4, 4], "huey": [2, 8], "pgqueuer": [8, 4], RAW: [1, 1]})
    assert measured.ratio("S8", BEST) == pytest.approx((4 / 2 + 4 / 4) / 2)


def test_a_round_that_failed_is_left_out_of_the_ratio_and_told() -> None:
    measured = results(S4={OURS: [10, 20, 30], RAW: [10]})
    measured.add({"S4": {RAW: [15]}}, number=2)
    measured.reasons["S4", RAW] = "failed: too slow"
    raw = measured.compare("S4")[0]
    assert raw.ratio == pytest.approx((10 / 10 + 30 / 15) / 2)
    assert raw.said == "failed: too slow"


def test_a_bar_may_stand_on_another_row_of_ours() -> None:
    measured = results(S1={OURS: [100]}, S2={OURS: [600]})
    (comparison,) = measured.compare("S2")
    assert (comparison.against, comparison.figure, comparison.ratio, comparison.said) == ("S1", 100, 6, "reached")


def test_a_contender_that_failed_is_a_line_with_its_reason() -> None:
    measured = results(S4={OURS: [100], RAW: [200]})
    measured.reasons["S4", "pgqueuer"] = "failed: no route"
    said = {comparison.against: comparison.said for comparison in measured.compare("S4")}
    assert said == {RAW: "", "pgqueuer": "failed: no route", "graphile": "not measured"}


def test_a_reason_names_no_address_and_no_directory() -> None:
    measured = results()
    measured.fail(
        "S4", "huey", "failed: GET https://pip.example.org/simple/huey: no such file /home/me/x.txt, 1/2 done"
    )
    assert measured.reasons["S4", "huey"] == "failed: GET … no such file …, 1/2 done"


def test_what_is_not_built_is_said_once_and_the_others_keep_their_figures() -> None:
    measured = results(S7={RAW: [900], "absurd": [128]})
    measured.reasons["S7", OURS] = "not built"
    shown = [(line[2], line[3], line[4], line[-1]) for line in lines([measured], WORKLOADS)]
    assert shown == [
        ("–", RAW, "900", "not built"),
        ("", "absurd", "128", ""),
    ]


def test_an_absolute_limit_is_in_the_unit_of_its_row() -> None:
    measured = results(S13={OURS: [130.0]})
    (line,) = lines([measured], WORKLOADS)
    assert line == ("S13 memory, 10,000 running, MB", "postgres", "130", "", "", "", "≤ 120", "tie (8%)")


def test_every_bar_is_about_something_that_is_measured() -> None:
    rows = {row.name: workload for workload in WORKLOADS for row in workload.rows}
    codes = {workload.code for workload in WORKLOADS}
    for (row, store), bars in BARS.items():
        assert store in rows[row].contenders
        for bar in bars:
            own = not bar.against or bar.against in codes or " " in bar.against
            if bar.against.partition(" ")[0] == ALONE:
                assert bar.against in rows, (row, bar)
            assert own or bar.against in rows[row].contenders[store], (row, store, bar)


def test_a_figure_beside_noise_is_compared_with_the_median_of_those_without() -> None:
    measured = results(N1={OURS: [6]}, N1_drain={OURS: [60]})
    for turn, (alone, rate) in enumerate([(4, 100), (10, 80), (3, 90)]):
        measured.add({"N0": {OURS: [alone]}, "N0 drain": {OURS: [rate]}}, turn)
    (latency,), (drain,) = measured.compare("N1"), measured.compare("N1 drain")
    assert (latency.figure, latency.ratio, latency.said) == (4, 1.5, "reached")
    assert (drain.figure, drain.ratio, drain.said) == (90, pytest.approx(2 / 3), "tie (5%)")


def test_noise_is_never_measured_without_the_same_without_noise() -> None:
    assert [workload.code for workload in chosen(["S1", "N9"])] == ["S1", "N0", "N0", "N9", "N0"]
    assert [workload.code for workload in chosen(["S1", "C2"])] == ["S1", "C2"]


def test_a_measure_that_is_taken_three_times_in_a_round_has_three_figures(tmp_path: Path) -> None:
    class Engine:
        name = "sqlite"

    suite = Suite(Engine(), tmp_path, QUICK, chosen(["N1"]), {})  # type: ignore[arg-type]
    assert [(turn, workload.code) for _, turn, workload, _ in suite.turns()] == [
        (0, "N0"),
        (0, "N1"),
        (1, "N0"),
        (2, "N0"),
    ]
    assert len([row for row in rows_of(suite.workloads) if row.name == "N0"]) == 1


def test_the_page_of_neighbours_has_a_line_for_each_kind_of_noise_and_each_cost() -> None:
    measured = results("sqlite", N1={OURS: [6]}, N13={OURS: [8]}, N13_due={OURS: [20]}, C1={OURS: [900], RAW: [300]})
    for turn in range(3):
        measured.add({"N0": {OURS: [4 + turn]}, "N0 rated": {OURS: [5]}}, turn)
    measured.add({"C4": {OURS: [14_000]}})
    measured.fail("N2", OURS, "failed: too slow")
    page = neighbours_page.render([measured], [one for one in WORKLOADS if one.page == NEIGHBOURS], ["A machine."])
    assert "| N0 | no noise, in the middle | 5.00 |" in page
    assert "| N1 | due tomorrow | 6.00 | 1.20 |" in page
    assert "| N13 | keys without a token (rated) | 20.00 | 5.00 | 4.00 |" in page
    assert "due: missed by 167%" in page
    assert "failed: too slow" in page
    assert "| C1 | send one by one, bytes | 900 | 300 |" in page
    assert "| C4 | small: send one by one, bytes | 14,000 |  | ≤ 15006 | reached |" in page
    assert "- A machine." in page


def test_every_workload_is_on_one_page() -> None:
    assert {workload.page for workload in WORKLOADS} == {RESULTS, NEIGHBOURS}
    assert {one.code[0] for one in WORKLOADS if one.page == NEIGHBOURS} == {"N", "C"}


def test_the_bytes_of_a_log_that_began_anew_are_those_that_are_in_it() -> None:
    assert LogPosition(7, 500).since(LogPosition(5, 200)) == (2, 300)
    assert LogPosition(7, 100).since(LogPosition(5, 200)) == (2, 100)


def test_page_and_picture_show_every_store_and_nothing_twice() -> None:
    both = [results(store, S4={OURS: [12_345], RAW: [50_000], "huey": [2_500]}) for store in ("sqlite", "postgres")]
    page = render(both, WORKLOADS, ["A machine."])
    assert page.count("| S4 drain, 1 process, /s | 12,345 |") == 2
    assert "- A machine." in page
    picture = ElementTree.fromstring(draw(both, WORKLOADS))
    assert len(picture.findall("{*}rect")) == 3 + 2 * 3  # the legend, then the bars of each store


def test_the_board_refuses_a_message_that_was_missed_or_ran_twice(tmp_path: Path) -> None:
    board = Board(tmp_path, 2, 4)
    first, second = (Tally(path) for path in board.paths)
    first.count(0, 0)
    with pytest.raises(RuntimeError, match="1 runs of 1 messages instead of 2"):
        board.check(2)
    second.count(1, 0)
    board.check(2)
    second.count(0, 0)
    with pytest.raises(RuntimeError, match="3 runs of 2 messages instead of 2"):
        board.check(2)

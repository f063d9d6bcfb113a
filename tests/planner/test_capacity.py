"""The largest rate that a replica carries: the search, what counts as carried, and fleets of replicas."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

from octavo.errors import OctavoError
from octavo.planner.deployment import Deployment, resolve
from octavo.planner.replay import ReplayOptions
from octavo.planner.search.capacity import Load, find_capacities, find_curves, largest_rate, measure
from octavo.planner.search.estimates import estimate, paired
from octavo.planner.search.fleet import find_fleets, parse_prices, price_of
from octavo.planner.search.jobs import Workers
from octavo.planner.search.samples import at_rate, busiest_window, offered_rate, redrawn
from octavo.planner.slo import parse_slo
from octavo.planner.traces.api import TraceRequest
from octavo.planner.traces.transforms import Listed

HERE = Workers(1)
SLO = parse_slo("ttft<2s@p95,tpot<60ms@p95")


def traffic(count: int = 60, gap: float = 0.5, prompt: int = 400, output: int = 60) -> tuple[TraceRequest, ...]:
    """Requests at a steady pace, their lengths uneven in a fixed pattern."""
    return tuple(
        TraceRequest(i * gap, prompt + 97 * (i % 7), output + 11 * (i % 5), str(i), max_tokens=200)
        for i in range(count)
    )


def starved(blocks: int = 200) -> Deployment:
    return Deployment("llama-3.1-8b", gpu="H100 SXM 80GB", num_blocks=blocks, max_model_len=2048)


def load(**changes: object) -> Load:
    return replace(Load(traffic(), ReplayOptions(slo=SLO), seeds=1), **changes)


# -- the search -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [0.01, 0.9, 1.0, 7.3, 900.0])
@pytest.mark.parametrize("start", [1.0, 40.0])
def test_bisection_ends_within_its_tolerance_below_the_limit(limit: float, start: float) -> None:
    rate, open_ended = largest_rate(lambda rate: rate <= limit, start, tolerance=0.02)
    assert rate <= limit <= rate * math.exp(0.02)
    assert not open_ended


def test_a_limit_that_holds_nowhere_is_zero_and_one_that_never_fails_is_a_lower_bound() -> None:
    assert largest_rate(lambda rate: False, 5.0) == (0.0, False)
    assert largest_rate(lambda rate: True, 5.0, highest=12.0) == (12.0, True)
    assert largest_rate(lambda rate: True, 50.0, highest=12.0) == (12.0, True)


def test_rates_beyond_the_highest_are_not_tried() -> None:
    asked: list[float] = []
    largest_rate(lambda rate: asked.append(rate) or True, 5.0, highest=12.0)
    assert max(asked) == 12.0


def test_capacity_is_what_trying_every_rate_finds() -> None:
    resolved, tolerance = resolve(starved()), 0.02
    found = find_capacities([starved()], load(tolerance=tolerance), HERE)[0].rate.mean
    step = 1.06
    rates = [found / step**6 * step**i for i in range(12)]
    carried = [measure(resolved, load(), 0, rate).sustained for rate in rates]
    first_failure = carried.index(False)
    assert all(carried[:first_failure])
    assert rates[first_failure - 1] / step <= found * math.exp(tolerance)
    assert found <= rates[first_failure]


def test_more_memory_never_carries_less() -> None:
    found = find_capacities([starved(blocks) for blocks in (130, 200, 300, 600)], load(), HERE)
    rates = [each.rate.mean for each in found]
    assert all(more >= less * (1 - 0.03) for less, more in itertools.pairwise(rates)), rates
    assert rates[-1] > 1.2 * rates[0], "memory matters here, or the test shows nothing"


def test_a_stricter_slo_never_carries_more() -> None:
    strict = load(options=ReplayOptions(slo=parse_slo("ttft<0.2s@p95,tpot<60ms@p95")))
    eased, held = (find_capacities([starved()], each, HERE)[0].rate.mean for each in (load(), strict))
    assert held <= eased


def test_a_rate_beyond_the_capacity_is_given_up_as_saturated() -> None:
    point = measure(resolve(starved()), load(options=ReplayOptions()), 0, 500.0)
    assert point.saturated
    assert not point.sustained


def test_without_an_slo_a_queue_that_does_not_grow_is_carried() -> None:
    found = find_capacities([starved()], load(options=ReplayOptions()), HERE)[0]
    assert found.rate.mean > 0
    assert measure(resolve(starved()), load(options=ReplayOptions()), 0, found.rate.mean / 2).sustained


def test_an_slo_that_fails_for_a_request_alone_carries_nothing() -> None:
    found = find_capacities([starved()], load(options=ReplayOptions(slo=parse_slo("ttft<1us"))), HERE)[0]
    assert found.rate.mean == 0.0
    assert not found.at_least


def test_a_deployment_that_cannot_work_says_why_with_the_bytes() -> None:
    found = find_capacities([replace(starved(), num_blocks=3)], load(), HERE)[0]
    assert found.impossible is not None
    assert "bytes" in found.impossible


def test_workers_change_nothing() -> None:
    with Workers(2) as workers:
        both = find_capacities([starved(), starved(300)], load(seeds=2), workers)
    assert both == find_capacities([starved(), starved(300)], load(seeds=2), HERE)


def test_curves_of_all_strategies_share_their_rates_and_take_in_the_knees() -> None:
    deployments = [replace(starved(400), strategy=name) for name in ("paged", "reserve-max")]
    paged, reserve = find_curves(deployments, load(), HERE, points=5)
    assert [p.rate for p in paged.points] == [p.rate for p in reserve.points]
    assert paged.points[0].rate < reserve.knee.rate.mean < paged.knee.rate.mean < paged.points[-1].rate
    assert reserve.strategy == "reserve-max"


# -- fleets ---------------------------------------------------------------------------------------------------------


def test_a_fleet_has_as_many_replicas_as_the_rate_needs_and_is_ranked_by_cost() -> None:
    prices = {"l40s": 1.0, "h100": 2.5}
    base = Deployment("llama-3.1-8b", max_model_len=2048)
    asked = load(requests=traffic(24), tolerance=0.1)
    answer = find_fleets(base, asked, 40.0, HERE, devices=("L40S", "H100 SXM 80GB"), prices=prices)
    assert len(answer.fleets) + len(answer.unfit) == 2 * 4 * 2
    for fleet in answer.fleets:
        assert fleet.replicas == math.ceil(40.0 / fleet.capacity.rate.mean)
        assert fleet.devices == fleet.replicas * fleet.tp
    costs = [fleet.cost for fleet in answer.fleets[: answer.searched]]
    assert costs == sorted(costs)


def test_a_device_that_does_not_hold_the_model_is_listed_with_its_shortfall() -> None:
    base = Deployment("llama-3.1-70b", max_model_len=2048)
    answer = find_fleets(base, load(requests=traffic(8), tolerance=0.5), 1.0, HERE, devices=("L4",))
    small = [unfit for unfit in answer.unfit if unfit.tp == 1]
    assert small
    assert all("bytes short" in unfit.reason for unfit in small)


@pytest.mark.parametrize("text", ["h100", "h100=", "=2", "h100=cheap", "h100=-1", "h100=2,foo=1"])
def test_a_price_that_cannot_be_read_is_named(text: str) -> None:
    with pytest.raises(OctavoError, match="price"):
        parse_prices(text)


def test_a_price_is_for_every_device_whose_name_it_begins() -> None:
    prices = parse_prices("h100=2.5, a10=0.6,h100 pcie=2")
    assert price_of("H100 SXM 80GB", prices) == 2.5
    assert price_of("H100 PCIe 80GB", prices) == 2.0
    assert price_of("A10", prices) == 0.6
    assert price_of("A100 SXM 80GB", prices) is None


# -- windows and seeds ----------------------------------------------------------------------------------------------


def test_the_busiest_window_is_the_shortest_stretch_of_so_many_requests() -> None:
    arrivals = [0, 10, 20, 21, 22, 23, 40, 50]
    trace = Listed("t", tuple(TraceRequest(float(t), 10, 5, str(i)) for i, t in enumerate(arrivals)))
    window = busiest_window(trace, 4)
    assert [request.id for request in window.requests] == ["2", "3", "4", "5"]
    assert [request.arrival for request in window.requests] == [0.0, 1.0, 2.0, 3.0]
    assert "4 of 8" in window.statement
    assert len(busiest_window(trace, 100).requests) == 8


def test_an_empty_trace_has_no_window() -> None:
    with pytest.raises(OctavoError, match="no requests"):
        busiest_window(Listed("t", ()), 4)


def test_redrawing_keeps_number_and_rate_and_seed_0_keeps_all() -> None:
    requests = traffic(200)
    assert redrawn(requests, 0) == requests
    other = redrawn(requests, 1)
    assert other != requests
    assert len(other) == len(requests)
    assert offered_rate(other) == pytest.approx(offered_rate(requests))
    assert redrawn(requests, 1) == other != redrawn(requests, 2)


def test_redrawing_keeps_the_order_of_requests_that_share_prefixes() -> None:
    requests = tuple(replace(r, hashes=(1, i), hash_block=16, arrival=i**1.5) for i, r in enumerate(traffic(200)))
    other = redrawn(requests, 1)
    assert [r.id for r in other] == [r.id for r in requests]
    assert [r.arrival for r in other] != [r.arrival for r in requests]


def test_a_rate_stretches_time_alone() -> None:
    faster = at_rate(traffic(), 8.0)
    assert offered_rate(faster) == pytest.approx(8.0)
    assert [r.prompt_tokens for r in faster] == [r.prompt_tokens for r in traffic()]


def test_an_interval_is_students_over_seeds_and_cancels_what_they_share() -> None:
    assert estimate([1.0, 2.0, 3.0]).error == pytest.approx(4.303 / math.sqrt(3))
    change = paired([10.0, 20.0, 30.0], [11.0, 21.0, 31.0])
    assert (change.mean, change.error) == (1.0, 0.0)
    assert change.differs_from_zero
    assert not estimate([5.0]).differs_from_zero

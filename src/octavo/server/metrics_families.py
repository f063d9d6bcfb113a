"""Builds Prometheus families that all carry the same labels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from octavo.server.metrics_counts import Histogram

Number = int | float


class Families:
    """Collects families; `labels` are on every sample. A counter is named without its `_total`."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._labels = labels
        self._made: list[Metric] = []

    def __iter__(self) -> Iterator[Metric]:
        return iter(self._made)

    def gauge(self, name: str, says: str, value: Number) -> None:
        self.gauges(name, says, "", {"": value})

    def gauges(self, name: str, says: str, label: str, values: Mapping[str, Number]) -> None:
        """One sample for each value of `label`."""
        self._many(GaugeMetricFamily(name, says, labels=self._names(label)), values)

    def counter(self, name: str, says: str, value: Number) -> None:
        self.counters(name, says, "", {"": value})

    def counters(self, name: str, says: str, label: str, values: Mapping[str, Number]) -> None:
        """One sample for each value of `label`."""
        self._many(CounterMetricFamily(name, says, labels=self._names(label)), values)

    def info(self, name: str, says: str, facts: Mapping[str, str]) -> None:
        """A gauge that is always 1: the facts are in its labels."""
        family = GaugeMetricFamily(name, says, labels=[*self._labels, *facts])
        family.add_metric([*self._labels.values(), *facts.values()], 1)
        self._made.append(family)

    def histogram(self, name: str, says: str, counted: Histogram) -> None:
        buckets, below = [], 0
        for bound, count in zip((*counted.bounds, float("inf")), counted.counts, strict=True):
            below += count
            buckets.append((floatToGoString(bound), below))  # type: ignore[no-untyped-call]
        family = HistogramMetricFamily(name, says, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), buckets, counted.sum)
        self._made.append(family)

    def _names(self, label: str) -> list[str]:
        return [*self._labels, label] if label else list(self._labels)

    def _many(self, family: CounterMetricFamily | GaugeMetricFamily, values: Mapping[str, Number]) -> None:
        for label, value in values.items():
            family.add_metric([*self._labels.values(), *([label] if label else [])], value)
        self._made.append(family)

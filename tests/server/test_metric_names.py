"""The names, types, labels and buckets of vLLM's metrics, as a live server of it exposes them, are those of ours."""

from __future__ import annotations

from tests.server.scraping import Figures, Watched

GAUGES = {
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:num_requests_waiting_by_reason",
    "vllm:kv_cache_usage_perc",
    "vllm:cache_config_info",
    "vllm:engine_sleep_state",
}
COUNTERS = {
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:prompt_tokens_by_source_total",
    "vllm:prompt_tokens_cached_total",
    "vllm:prompt_tokens_recomputed_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:external_prefix_cache_queries_total",
    "vllm:external_prefix_cache_hits_total",
    "vllm:mm_cache_queries_total",
    "vllm:mm_cache_hits_total",
    "vllm:num_preemptions_total",
    "vllm:request_success_total",
    "vllm:admission_rejections_total",
}
TTFT = ".001 .005 .01 .02 .04 .06 .08 .1 .25 .5 .75 1 2.5 5 7.5 10 20 40 80 160 640 2560"
TOKEN = ".01 .025 .05 .075 .1 .15 .2 .3 .4 .5 .75 1 2.5 5 7.5 10 20 40 80"
REQUEST = ".3 .5 .8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680"
LENGTHS = "1 2 5 10 20 50 100 200 500 1000 2000"  # up to a model length of 4096
HISTOGRAMS = {
    "vllm:time_to_first_token_seconds": TTFT,
    "vllm:inter_token_latency_seconds": TOKEN,
    "vllm:request_time_per_output_token_seconds": TOKEN,
    "vllm:e2e_request_latency_seconds": REQUEST,
    "vllm:request_queue_time_seconds": REQUEST,
    "vllm:request_inference_time_seconds": REQUEST,
    "vllm:request_prefill_time_seconds": REQUEST,
    "vllm:request_decode_time_seconds": REQUEST,
    "vllm:request_prompt_tokens": LENGTHS,
    "vllm:request_generation_tokens": LENGTHS,
    "vllm:request_max_num_generation_tokens": LENGTHS,
    "vllm:request_params_max_tokens": LENGTHS,
    "vllm:request_prefill_kv_computed_tokens": LENGTHS,
    "vllm:request_params_n": "1 2 5 10 20",
    "vllm:iteration_tokens_total": "1 8 16 32 64 128 256 512 1024 2048 4096 8192 16384",
}
OLD = {
    "vllm:time_per_output_token_seconds_count",
    "vllm:gpu_cache_usage_perc",
    "vllm:gpu_prefix_cache_queries_total",
    "vllm:gpu_prefix_cache_hits_total",
    "vllm:num_requests_swapped",
    "vllm:cpu_cache_usage_perc",
}


def scrape(vllm: bool = True, compat: bool = False) -> Figures:
    w = Watched(vllm=vllm, compat=compat, pages=2048, max_model_len=4096)
    w.add(10, 4)
    w.drain()
    return w.scrape()


def test_every_name_of_the_golden_list_is_there_with_its_type() -> None:
    figures = scrape()
    types = {}
    for line in figures.text.splitlines():
        if line.startswith("# TYPE vllm:"):
            _, _, name, kind = line.split()
            types[name] = kind
    expected = dict.fromkeys(GAUGES, "gauge") | dict.fromkeys(COUNTERS, "counter")
    assert types == expected | dict.fromkeys(HISTOGRAMS, "histogram")
    for name in GAUGES | COUNTERS:
        assert figures.samples[name]


def test_buckets_are_those_of_the_golden_list() -> None:
    figures = scrape()
    for name, bounds in HISTOGRAMS.items():
        found = [dict(labels)["le"] for labels in figures.samples[f"{name}_bucket"]]
        assert [float(bound) for bound in found] == [*map(float, bounds.split()), float("inf")]
        assert figures(f"{name}_bucket", le="+Inf") == figures(f"{name}_count")
    bounds = [dict(labels)["le"] for labels in figures.samples["vllm:time_to_first_token_seconds_bucket"]]
    assert bounds[:2] == ["0.001", "0.005"]
    assert "1.0" in bounds


def test_every_sample_carries_the_model_and_the_engine() -> None:
    for family in scrape(compat=True).families.values():
        for sample in family.samples:
            if not sample.name.startswith("process_"):
                assert sample.labels["model_name"] == "m"
                assert sample.labels["engine"] == "0"


def test_the_labels_that_gateways_and_dashboards_read() -> None:
    figures = scrape()
    (labels,) = figures.samples["vllm:cache_config_info"]
    assert {"block_size": "4", "num_gpu_blocks": "2048"}.items() <= dict(labels).items()
    assert {"stop", "length", "abort", "error", "repetition"} == set(
        figures.by("vllm:request_success_total", "finished_reason")
    )
    assert {"capacity", "deferred"} <= set(figures.by("vllm:num_requests_waiting_by_reason", "reason"))
    reasons = {"max_num_queued_reqs", "max_num_queued_tokens"}
    assert set(figures.by("vllm:admission_rejections_total", "reason")) == reasons


def test_no_series_says_when_it_was_created() -> None:
    assert "_created" not in scrape(compat=True).text


def test_old_names_are_given_only_when_asked_for() -> None:
    figures = scrape(compat=True)
    assert set(figures.samples) >= OLD
    assert not set(scrape().samples) & OLD
    assert figures("vllm:gpu_prefix_cache_queries_total") == figures("vllm:prefix_cache_queries_total") == 10


def test_all_names_of_others_can_be_switched_off() -> None:
    figures = scrape(vllm=False, compat=True)
    assert "vllm" not in figures.text
    assert figures("octavo_time_to_first_token_seconds_count") == 1

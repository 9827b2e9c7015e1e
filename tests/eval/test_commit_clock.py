"""When tokens came: what the clock notes of each loop, and the latencies that are made of it."""

import time
from collections.abc import Iterator

import pytest
import torch

from eagle.eval import methods
from eagle.eval.answers import Answer
from eagle.eval.figures import device_use, figures, inter_token, peaks, record, spread
from eagle.eval.meter import Meter, Use, gpu_use
from eagle.eval.methods import CommitClock
from tests.eval.test_figures import answer, request

CPU = torch.device("cpu")


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that shows 0, 1, 3, 6, 10, 15 ... seconds, one further at every look."""

    def times() -> Iterator[float]:
        now, step = 0.0, 0
        while True:
            yield now
            step += 1
            now += step

    shown = times()
    monkeypatch.setattr(methods.time, "perf_counter", lambda: next(shown))


@pytest.mark.usefixtures("ticks")
def test_the_prompt_is_passed_over_the_first_token_is_no_commit_and_blocks_keep_their_size() -> None:
    clock = CommitClock(CPU)  # 0
    clock.put(torch.arange(5))
    clock.put(torch.tensor([7]))  # 1
    clock.put(torch.tensor([8, 9, 10]))  # 3
    clock.put(torch.tensor([11]))  # 6
    clock.end()
    assert clock.times() == {  # 10
        "seconds": 10.0,
        "first_token_seconds": 1.0,
        "commit_tokens": [3, 1],
        "commit_seconds": [2.0, 3.0],
    }


@pytest.mark.usefixtures("ticks")
def test_an_answer_of_which_nothing_was_streamed_has_its_end_as_first_token() -> None:
    clock = CommitClock(CPU)
    clock.put(torch.arange(5))
    assert clock.times() == {"seconds": 1.0, "first_token_seconds": 1.0, "commit_tokens": [], "commit_seconds": []}


def timed(tokens: list[int], seconds: list[float], use: Use | None = None) -> Answer:
    return Answer(
        tokens=list(range(1 + sum(tokens))),
        seconds=1.0 + sum(seconds),
        first_token_seconds=1.0,
        commit_tokens=tokens,
        commit_seconds=seconds,
        use=use or Use(),
    )


def test_inter_token_latency_shares_a_blocks_time_over_its_tokens_and_the_commit_gap_does_not() -> None:
    answers = [timed([4, 1], [0.4, 0.3]), timed([1], [0.5])]
    # Tokens: 100 ms four times, 300, 500. Commits: 400, 300, 500.
    latency = inter_token(answers)
    assert latency.p50 == pytest.approx(100)
    assert latency.p95 == pytest.approx(450)
    one = request("a")
    one.answers["eagle2"] = answers[0]
    values = figures([one], "eagle2", baselines=[])
    assert (values.commit_gap_ms.p50, values.inter_token_ms.p50) == (pytest.approx(350), pytest.approx(100))
    assert values.first_token_ms_p95 == pytest.approx(1000)
    assert spread([]) is None
    assert inter_token([timed([], [])]) is None


def test_the_mean_of_requests_taus_counts_short_answers_as_much_as_long_ones() -> None:
    short, long = request("a"), request("b")
    short.answers["eagle2"], long.answers["eagle2"] = answer(4, 1.0, [3]), answer(7, 1.0, [1, 0, 1, 0])
    values = figures([short, long], "eagle2", baselines=[])
    assert (values.tau, values.tau_raw) == (pytest.approx(9 / 5), pytest.approx(1 + 5 / 5))
    assert values.tau_request_mean == pytest.approx((3 + 1.5) / 2)
    assert figures([short], "plain", baselines=[]).tau_request_mean is None


def test_device_use_is_processor_time_over_wall_clock_and_threads_or_what_the_gpu_says() -> None:
    cpu = [timed([1], [1.0], Use(cpu_seconds=3.0, threads=2)), timed([1], [3.0], Use(cpu_seconds=3.0, threads=2))]
    assert device_use(cpu) == pytest.approx(6 / 12)
    gpu = [timed([1], [1.0], Use(cpu_seconds=9.0, peak_cuda_bytes=5, gpu_use=share)) for share in (0.5, 0.7, None)]
    assert device_use(gpu) == pytest.approx(0.6)
    assert device_use([timed([1], [1.0], Use(peak_cuda_bytes=5))]) is None, "no pynvml: not the CPU's figure instead"
    assert peaks([*cpu, *gpu]) == {"rss_bytes": None, "cuda_bytes": 5}


def test_the_record_table_names_both_baselines_latency() -> None:
    one = request("a")
    one.answers.update(hf=timed([1, 1], [0.4, 0.4]), plain=timed([1, 1], [0.2, 0.2]), eagle2=timed([2], [0.2]))
    row = record([one], "eagle2", baselines=["hf", "plain"])
    assert row.baseline_inter_token_ms == {"hf": pytest.approx(400), "plain": pytest.approx(200)}
    assert row.inter_token_ms == pytest.approx(100)


def test_the_meter_sees_processor_time_and_a_peak_that_has_gone_again() -> None:
    with Meter(CPU) as idle:
        time.sleep(0.1)
    with Meter(CPU) as busy:
        block = torch.ones(32, 2**20)
        del block
        until = time.process_time() + 0.05
        while time.process_time() < until:
            pass
    with Meter(CPU) as after:
        pass
    assert busy.use.cpu_seconds >= 0.05
    assert idle.use.cpu_seconds < 0.09
    assert (busy.use.peak_cuda_bytes, busy.use.gpu_use, busy.use.threads) == (None, None, torch.get_num_threads())
    if busy.use.peak_rss_bytes is not None:
        assert busy.use.peak_rss_bytes - after.use.peak_rss_bytes > 100 * 2**20


def test_without_pynvml_or_a_gpu_the_use_of_one_is_not_told() -> None:
    assert gpu_use(torch.device("cuda:0")) is None or torch.cuda.is_available()

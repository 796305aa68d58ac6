"""The cost model on the kernels at V4-Flash and V4-Pro sizes: close to the bound, and as the documentation says."""

import nki_kernels
import pytest

pytestmark = pytest.mark.skipif(nki_kernels.BACKEND != "simulator", reason="the cost model is nki_sim's")
nki_cost = pytest.importorskip("benchmarks.nki_cost")
PAGE = nki_kernels.FOLDER.parent / "docs" / "nki-kernels.md"


@pytest.mark.parametrize("case", nki_cost.cases(), ids=lambda case: f"{case.model} {case.kernel} {case.size}")
def test_the_slowest_engine_is_within_twice_the_bound(case):
    trace = case.trace()
    # Three DMAs of 8 descriptors an engine are all there is at a decode step's pooling: 107 ns each, 2.57 us.
    floor = 3 * 8 * 107 if case.size == "N = 8, R = 8, D = 512" else 0
    assert trace.slowest_ns <= max(2 * case.bound(trace).ns, floor), case.kernel


@pytest.mark.parametrize("case", nki_cost.cases(), ids=lambda case: f"{case.model} {case.kernel} {case.size}")
def test_the_kernel_moves_what_the_bound_counts(case):
    trace = case.trace()
    # The indexer reads its queries and weights again for every 4096 keys.
    again = sum(a.nbytes for a in case.arguments[0:3:2]) if case.kernel == "weighted_scores" else 0
    assert case.hbm_bytes <= trace.hbm_bytes <= case.hbm_bytes + again
    assert trace.gathered_rows == case.gathered_rows


def test_the_documented_table_is_the_script_s():
    assert nki_cost.markdown() in PAGE.read_text(encoding="utf-8")

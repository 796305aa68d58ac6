"""Breaking a kernel in one place is noticed: every mutant fails a small fixed battery or is refused by the simulator.

A mutation is a text substitution in one kernel file, written `context«old→new»context`; the folder is copied, changed
and loaded as a package of its own. A substitution that no longer applies fails, so the list follows the kernels.
"""

import re
import shutil

import nki_kernels
import nki_sim
import numpy as np
import pytest
from nki_kernels import assert_close, attention_problem, pool_problem, pooled, run, score_problem, scores

REFUSED = nki_sim.NkiValidationError if nki_kernels.BACKEND == "simulator" else Exception

STAGES = [
    ("query not scaled", "operand0=«plan.power→1.0»"),
    ("query chunks not told apart", "data=tile[:, «d * CHUNK : (d + 1) * CHUNK→:CHUNK»]"),
    ("query of the trip's first row", "offset=«first * heads * LATENT→0»"),
    ("keys: the same tile transposed twice", "data=keys[:, «c + j→c», d * CHUNK"),
    ("keys: chunks of d swapped", "dst=staged[:, j, «d→d ^ 1», :], data=keys"),
    ("keys: not transposed", "dst=staged[:, j, «d, :→:, d»], data=keys"),
    ("scores: d chunks overwrite each other", "accumulate=«True→False»"),
    ("scores: mask adds to what was there", "mask[:, c : c + n, :], accumulate=«False→True»"),
    ("scores: a column block too far", "scores[:, «c * CHUNK : (c + n→(c + 1) * CHUNK : (c + n + 1»)"),
    ("scores: d chunk 0 used four times", "stationary=q_t[:, «d→0», :]"),
    ("mask of the trip's first row", "mask.shape[0], «g→0», :]"),
    ("mask in the other order of keys", "natural if «gathers→not gathers» else"),
    ("softmax: maximum not negated", "axis=1, negate=«True→False»"),
    ("softmax: minimum instead of maximum", "op=«nl.maximum→nl.minimum», data=scores"),
    ("softmax: maximum ignores sink and past", "op1=«nl.minimum→nl.maximum», operand1=neg_before"),
    ("softmax: maximum not scaled", "operand0=«plan.factor→1.0»"),
    ("softmax: exp not scaled", "scale=«plan.factor→1.0»"),
    ("softmax: exp without bias", "scale=plan.factor, bias=«neg_max→0.0»"),
    ("softmax: sums run on from row to row", "«reduce_cmd.reset_reduce→reduce_cmd.reduce»"),
    ("softmax: decay with the wrong sign", "scale=«-1.0→1.0», bias=neg_max"),
    ("values: tiles overwrite each other", "accumulate=«c > 0→False»"),
    ("values: starts on an undefined bank", "accumulate=«c > 0→True»"),
    ("values: off-by-one tile", "moving=keys[:, «c→max(c - 1, 0)», :]"),
    ("values: weights of another tile", "weights[:, «(c + j) * CHUNK : (c + j→c * CHUNK : (c» + 1)"),
    ("output not divided", "op=nl.copy, data=«product, scale=inverse→product»"),
    ("output divided twice over", "«nisa.reciprocal(dst=inverse, data→nisa.tensor_copy(dst=inverse, src»=denominator)"),
    ("output of the trip's first row", "offset=«first * plan.heads * LATENT→0»"),
]
DRIVER = [
    ("sink dropped from the denominator", "data1=total, data2=decay, op=«nl.add→nl.maximum»"),
    ("sink of a streamed row dropped", "dst=total, value=«1.0→0.0»"),
    ("sink not negated", "operand0=«-1.0→1.0»"),
    ("sink not clamped below", "op1=«nl.maximum, operand1=-FAR→nl.minimum, operand1=FAR»"),
    ("sink not clamped above", "op0=«nl.minimum, operand0=FAR→nl.maximum, operand0=-FAR»"),
    ("negative scale loses its sign", "«-1.0→1.0», -factor"),
    ("heads of another row", "«member * heads : (member + 1) * heads→0:heads»"),
    ("results of a tile share a slot", "result[«slot * heads : (slot + 1) * heads→:heads»]"),
    ("only the last result of a tile stored", "«g - slot, slot +→g,» 1"),
    ("rows after the last whole trip skipped", "nl.fori_loop(«together→together + 1», rows, one)"),
    ("streamed: accumulator does not decay", "data=acc, op0=nl.multiply, operand0=«decay→1.0»"),
    ("streamed: sum does not decay", "data=total, op0=nl.multiply, operand0=«decay→1.0»"),
    ("streamed: maximum not carried", "dst=neg_max, src=«new_neg_max→neg_max»"),
    ("streamed: last keys skipped", "if tiles > «whole→whole + 1»:"),
    ("streamed: first block skipped", "nl.fori_loop(«0→BLOCK_TILES», whole, full"),
    ("streamed: all rows read row 0's keys", "position(row, tile, «tiles→0»)"),
]
CONTIGUOUS = [
    ("keys of the trip's first row", "«g * k * LATENT→0»"),
    ("one row's keys too far", "«g→(g + 1)» * k * LATENT"),
]
GATHERED = [
    ("indices of the trip's first row", "columns[:, c, «g : g + 1→0:1»]"),
    ("the first index column only", "columns[:, «c→0», g : g + 1]"),
    ("index tiles not told apart", "data=numbers[:, «c * CHUNK : (c + 1) * CHUNK→:CHUNK»]"),
    (
        "indices off by one",
        "«tensor_copy(dst=columns, src→tensor_scalar(op0=nl.add, operand0=1.0, dst=columns, data»=staged)",
    ),
]
SCORES = [
    ("keys of one tile only", "data=keys[:, «c + j→c», :]"),
    ("keys left in load order", "c : c + m], src=staged.«permute((0, 2, 1))→reshape((WIDTH, TILE, m))»"),
    ("queries of fold 0 only", "data=tile[:, «(f + j) * WIDTH : (f + j + 1) * WIDTH→:WIDTH»]"),
    ("relu dropped on VectorE", "op0=«nl.maximum→nl.add», operand0=0.0"),
    ("relu dropped on ScalarE", "op=«nl.relu→nl.copy»"),
    ("one block of keys scored again and again", "keys_t[:, «b * TILE : (b + m)→: m» * TILE]"),
    ("scores added to the last block's", "keys_t[:, b * TILE : (b + m) * TILE], accumulate=«False→True»"),
    ("folds overwrite each other", "accumulate=«f > 0→False»"),
    ("folds run on", "accumulate=«f > 0→True»"),
    ("weights of fold 0", "moving=columns[:, «f→0», :]"),
    ("a token weighs every lane", "data2=group.own, op=«nl.multiply→nl.maximum»"),
    ("heads spread in the wrong order", "src=identity[:, :, «f→fold - 1 - f»]"),
    ("weights of the first tokens", "scalar_offset=token, indirect_dim=«1→0»"),
    ("keys of a tile shifted", "active[:, f, «c * TILE : (c + 1) * TILE→0:TILE»]"),
    ("sums stored in the wrong tile", "dst=by_key[:, :, «b : b + m→:m»]"),
    ("output of the group's first tokens", "offset=«t * n→0»"),
    ("output tiles of another token", "position(token, tile, «out.shape[1] // TILE→count»)"),
    (
        "tokens after the last whole group skipped",
        "nl.fori_loop(tokens // group * «group→group + 1», tokens, remaining",
    ),
    ("keys after the last whole segment skipped", "if tiles % SEGMENT > «0→1»"),
]
POOL = [
    ("maximum not subtracted", "op=«nl.subtract→nl.add»"),
    ("minimum instead of maximum", "op=«nl.maximum→nl.minimum», data=scores"),
    ("maximum of an all-masked column not clamped", "operand0=«FP32_MIN→-3.5e38»"),
    ("mask inverted", "reverse_pred=«True→False»"),
    ("mask catches low scores too", "bias=«5.0→0.0»"),
    ("exp dropped", "op=«nl.exp→nl.copy»"),
    ("weights not multiplied", "data2=latents, op=«nl.multiply→nl.add»"),
    ("sum of products instead of weights", "dst=total, op=nl.add, data=«weights→products»"),
    ("denominator not clamped", "operand0=«1.0→0.0»"),
    ("not divided", "data2=inverse, op=«nl.multiply→nl.maximum»"),
    ("multiplied by the denominator", "op=«nl.reciprocal→nl.copy»"),
    ("reduced over rows and not over r", "dst=numerator, op=nl.add, data=products, axis=«3→2»"),
    ("chunk 0 of d four times", "data=piece[:, «c * lanes : (c + 1) * lanes→:lanes»]"),
    ("pieces of rows overwrite each other", "dst=turned[:, :, «row : row + m→:m»]"),
    ("columns of D not told apart", "offset=row * «d + first→d»"),
    ("one row too far", "offset=«row→(row + 1)» * d + first"),
    ("output columns not told apart", "offset=«first→0», scalar_offset=n"),
    ("output chunks swapped", "data=pooled[:, «c→chunks - 1 - c», :]"),
    ("rows after the last whole trip skipped", "nl.fori_loop(count // step * «step→step + 1», count, remaining"),
]
ATTENTION = [("_attention.py", m) for m in STAGES] + [("sparse_attn.py", m) for m in DRIVER]
MUTATIONS = {
    "gathered_attn": ATTENTION + [("sparse_attn.py", m) for m in CONTIGUOUS],
    "gathered_attn_idx": ATTENTION + [("_attention.py", m) for m in GATHERED],
    "weighted_scores": [("index_score.py", m) for m in SCORES],
    "softmax_pool": [("compress_pool.py", m) for m in POOL],
}
PROBLEMS = [
    # A trip of four rows in two tiles, a row left over, an odd number of key tiles, a sink that matters.
    attention_problem(1, 5, 64, 896, largest=60.0),
    # Streamed, the largest logits late; two rows.
    attention_problem(2, 2, 20, 2176, largest=20.0, live=0.9),
    # A negative scale; sinks at the limits; the first row without a live key, its lanes not zero.
    attention_problem(3, 2, 5, 256, scale=-0.3, sink=[-np.inf, np.inf, -1e30, 0.0, 2.0])._replace(
        mask_bias=np.float32([[-1e30] * 256, [0.0] * 256])
    ),
    # Logits whose exp overflows unless the maximum is subtracted, and scaled as they are.
    attention_problem(5, 1, 2, 128, largest=400.0),
    # A dead row streams: its state must not leave the sink.
    attention_problem(4, 1, 2, 2304, live=0.0, sink=-np.inf),
]


def _attention(kernel, gathers):
    for number, problem in enumerate(PROBLEMS):
        if gathers:
            table, idx = problem.as_table(np.random.default_rng(number))
            result = run(kernel, problem.q, table, idx, *problem[2:])
        else:
            result = run(kernel, *problem)
        assert_close(result, problem.exact)


def _scores(kernel):
    for problem in (score_problem(1, 9, 64, 2176), score_problem(2, 6, 64, 4352), score_problem(3, 65, 8, 128)):
        assert_close(run(kernel, *problem), scores(*problem))


def _pool(kernel):
    for problem in (
        pool_problem(1, 70, 8, 600),
        pool_problem(2, 3, 140, 130, masked=0.9),
        pool_problem(3, 2, 2, 4, masked=1.0),
        pool_problem(4, 2, 2, 128, spread=1e38, masked=0.0),
    ):
        assert_close(run(kernel, *problem), pooled(*problem))


BATTERY = {
    "gathered_attn": ("sparse_attn", lambda kernel: _attention(kernel, False)),
    "gathered_attn_idx": ("sparse_attn", lambda kernel: _attention(kernel, True)),
    "weighted_scores": ("index_score", _scores),
    "softmax_pool": ("compress_pool", _pool),
}


def battery(name, folder=nki_kernels.FOLDER):
    stem, judge = BATTERY[name]
    judge(getattr(nki_kernels.load(stem, folder), name))


@pytest.mark.parametrize("name", BATTERY)
def test_the_battery_passes_on_the_kernel_itself(name):
    battery(name)


def test_every_kernel_has_at_least_ten_mutations():
    assert all(len({what for _, (what, _) in listed}) >= 10 for listed in MUTATIONS.values())


CASES = [
    pytest.param(name, file, change, id=f"{name}: {what}")
    for name, listed in MUTATIONS.items()
    for file, (what, change) in listed
]


@pytest.mark.parametrize(("name", "file", "change"), CASES)
def test_a_broken_kernel_is_noticed(name, file, change, tmp_path):
    folder = tmp_path / "kernels"
    shutil.copytree(nki_kernels.FOLDER, folder, ignore=shutil.ignore_patterns("__pycache__"))
    before, old, new, after = re.fullmatch("(.*)«(.*)→(.*)»(.*)", change).groups()
    source = (folder / file).read_text()
    found = source.count(before + old + after)
    assert found == 1, f"{file} holds {found} times: {before}{old}{after}"
    (folder / file).write_text(source.replace(before + old + after, before + new + after))
    with pytest.raises((AssertionError, REFUSED)):
        battery(name, folder)

"""The nki_hop stand-in: one node per kernel call, constants in a side table, a runner that can be exchanged."""

from __future__ import annotations

import sys

import neuron_sim
import pytest
import torch

pytestmark = pytest.mark.skipif(neuron_sim.install() != "simulated", reason="the real torch_neuronx is in use")


def halves_sum(a, b, *, scale=0.5, flag=None):
    raise AssertionError("the definition runs in its place")


@neuron_sim.define("halves_sum")
def _definition(a, b, scale, flag):
    return (a + b) * scale, (a - b).bfloat16()


@pytest.fixture
def hop():
    import torch_neuronx.nki_hop

    return torch_neuronx.nki_hop


@pytest.fixture
def ab():
    return torch.arange(4.0, device="neuron"), torch.ones(4, device="neuron")


def test_install_is_idempotent_and_leaves_an_importable_package(hop):
    modules = sys.modules["torch_neuronx"], sys.modules["torch_neuronx.nki_hop"]
    assert neuron_sim.install() == "simulated"
    assert (sys.modules["torch_neuronx"], sys.modules["torch_neuronx.nki_hop"]) == modules
    assert modules[0].wrap_nki is hop.wrap_nki
    assert modules[0].__spec__.name == "torch_neuronx"


def test_every_wrap_registers_a_kernel(hop):
    first, second = hop.wrap_nki(halves_sum), hop.wrap_nki(halves_sum)
    assert first.kernel_idx != second.kernel_idx
    assert hop.kernel_registry.name(first.kernel_idx) == hop.kernel_registry.name(second.kernel_idx) == "halves_sum"


def test_positions_keywords_defaults_and_grids_all_work(hop, ab):
    caller = hop.wrap_nki(halves_sum)
    want = [0.5, 1.0, 1.5, 2.0]
    for result in (caller(*ab), caller(a=ab[0], b=ab[1]), caller[2](ab[0], b=ab[1]), caller[1, 2](*ab, flag=True)):
        assert isinstance(result, tuple)
        assert result[0].tolist() == want
        assert result[1].dtype == torch.bfloat16
        assert {t.device.type for t in result} == {"neuron"}
    assert caller(*ab, scale=2.0)[0].tolist() == [2.0, 4.0, 6.0, 8.0]
    for wrong in (lambda: caller(ab[0]), lambda: caller(*ab, 1, 2, 3), lambda: caller(*ab, typo=1)):
        with pytest.raises(TypeError, match="NKI kernel takes"):
            wrong()


def test_a_cpu_tensor_and_an_undefined_kernel_are_refused(hop, ab):
    caller = hop.wrap_nki(halves_sum)
    with pytest.raises(RuntimeError, match="halves_sum: b lies on cpu"):
        caller(ab[0], torch.ones(4))
    with pytest.raises(RuntimeError, match="halves_sum: a lies on cpu"):
        caller(torch.ones(4), torch.ones(4))

    def undefined(a):
        return a

    with pytest.raises(LookupError, match="no definition for NKI kernel 'undefined'"):
        hop.wrap_nki(undefined)(ab[0])


def test_a_kernel_cannot_write_its_arguments(hop, ab):
    @neuron_sim.define("greedy")
    def _greedy(a):
        return a.zero_()

    def greedy(a):
        raise AssertionError

    hop.wrap_nki(greedy)(ab[1])
    assert ab[1].tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_a_trace_holds_one_node_that_lists_tensors_and_keys_constants(hop, ab, dynamic):
    caller = hop.wrap_nki(halves_sum)

    def function(a, b):
        total, difference = caller[2](a, b, scale=0.25)
        return total + difference

    compiled = neuron_sim.compile_fullgraph(function, dynamic=dynamic)
    torch.testing.assert_close(compiled(*ab).cpu(), function(*ab).cpu())
    [node] = neuron_sim.graph_rules.kernel_nodes(compiled.graph)
    assert set(node.kwargs) == {
        *("kernel_idx", "grid", "backend_config", "operand_output_aliases", "args", "arg_names", "constant_args_key")
    }
    assert list(node.kwargs["arg_names"]) == ["a", "b"]
    assert [arg.op for arg in node.kwargs["args"]] == ["placeholder", "placeholder"]
    assert tuple(node.kwargs["grid"]) == (2,)
    assert hop.kernel_registry.constants(node.kwargs["constant_args_key"]) == {"scale": 0.25, "flag": None}
    assert [(tuple(t.shape), t.dtype, t.device.type) for t in node.meta["val"]] == [
        ((4,), torch.float32, "neuron"),
        ((4,), torch.bfloat16, "neuron"),
    ]


def test_equal_constants_share_a_key_and_others_do_not(hop):
    key = hop.kernel_registry.key_of({"scale": 0.125, "flag": None})
    assert hop.kernel_registry.key_of({"scale": 0.125, "flag": None}) == key
    assert hop.kernel_registry.key_of({"scale": 0.126, "flag": None}) != key


class Doubler:
    """A runner that replaces every kernel, and says what it was asked."""

    def __init__(self):
        self.launches = []

    def run(self, launch):
        self.launches.append(launch)
        return launch.arguments["a"] * 2

    def meta(self, launch):
        return launch.arguments["a"]


def test_the_runner_is_exchanged_also_under_a_graph_already_traced(hop, ab):
    caller = hop.wrap_nki(halves_sum)
    compiled = neuron_sim.compile_fullgraph(lambda a, b: caller(a, b)[0])
    assert compiled(*ab).tolist() == [0.5, 1.0, 1.5, 2.0]
    runner = Doubler()
    with neuron_sim.use_runner(runner):
        assert caller(*ab).tolist() == [0, 2, 4, 6]
    [launch] = runner.launches
    assert (launch.name, launch.kernel) == ("halves_sum", halves_sum)
    assert all(t.device.type == "cpu" for t in launch.arguments.values() if isinstance(t, torch.Tensor))
    assert compiled(*ab).tolist() == [0.5, 1.0, 1.5, 2.0]


@pytest.mark.parametrize("ones_for_shapes", [False, True], ids=["definition", "ones"])
def test_the_simulator_runs_the_kernel_itself(hop, ones_for_shapes):
    import nki.isa as nisa
    import nki.language as nl

    import nki

    @nki.jit
    def negate(a, factor):
        tile = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=tile, src=a)
        nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=factor)
        out = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
        nisa.dma_copy(dst=out, src=tile)
        return out

    if not ones_for_shapes:
        neuron_sim.define("negate")(lambda a, factor: torch.empty_like(a))  # its values are wrong, its shapes right
    caller = hop.wrap_nki(negate)
    a = torch.arange(6.0, device="neuron").reshape(2, 3).bfloat16()
    with neuron_sim.use_runner(neuron_sim.SimulatorRunner(ones_for_shapes=ones_for_shapes)):
        assert caller(a, -1.0).tolist() == [[0, -1, -2], [-3, -4, -5]]
        compiled = neuron_sim.compile_fullgraph(lambda a: caller(a, factor=-2.0))
        assert compiled(a).tolist() == [[0, -2, -4], [-6, -8, -10]]
        assert compiled.targets() == ["nki_kernel_wrapper"]

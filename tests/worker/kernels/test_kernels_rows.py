"""Operators on rows: torch's and the compiled ones agree, for any layout, size and number of threads."""

import pytest
import torch

from medha_worker.kernels.cpu.compiled_rows import CompiledRows
from medha_worker.kernels.cpu.helper_team import HelperTeam
from medha_worker.kernels.torch_rows import TorchRows


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def compiled() -> CompiledRows:
    return CompiledRows(HelperTeam())


@pytest.fixture(params=[1, 2], autouse=True)
def _threads(request: pytest.FixtureRequest) -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("rows", [1, 3, 700])
def test_rms_norm_of_rows_and_of_heads_within_rows(compiled: CompiledRows, rows: int) -> None:
    weight = normal(96, seed=1)
    plain, wide = normal(rows, 96) * 3, normal(rows, 5, 96)
    for x in (plain, wide, wide[:, 1:4]):
        found = compiled.rms_norm(x, weight, 1e-5)
        wanted = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
        torch.testing.assert_close(found.double(), wanted, rtol=2e-6, atol=2e-6)
        torch.testing.assert_close(found, TorchRows().rms_norm(x, weight, 1e-5), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("rows", [1, 3, 700])
def test_rotation_is_in_place_and_leaves_other_heads_alone(compiled: CompiledRows, rows: int) -> None:
    angles = normal(rows, 32, seed=2) * 10
    heads = normal(rows, 6, 64)
    results = []
    for operators in (compiled, TorchRows()):
        x = heads.clone()
        operators.rotate(x[:, 1:5], angles.cos(), angles.sin())
        results.append(x)
    torch.testing.assert_close(results[0], results[1], rtol=2e-6, atol=2e-6)
    assert torch.equal(results[0][:, 0], heads[:, 0])
    assert torch.equal(results[0][:, 5], heads[:, 5])
    pairs = torch.view_as_complex(torch.stack(heads[:, 1:5].double().chunk(2, dim=-1), -1).contiguous())
    turned = pairs * torch.polar(torch.ones_like(angles), angles).to(torch.complex128)[:, None]
    wanted = torch.cat([turned.real, turned.imag], dim=-1)
    torch.testing.assert_close(results[0][:, 1:5].double(), wanted, rtol=2e-6, atol=4e-6)


@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize("rows", [1, 3, 700])
def test_an_activation_times_up_is_right_far_from_zero_too(
    compiled: CompiledRows, rows: int, activation: str
) -> None:
    gate_up = normal(rows, 192)
    gate_up[0, :4] = torch.tensor([-200.0, -30.0, 30.0, 200.0])
    gate, up = gate_up.double().chunk(2, dim=1)
    activated = {
        "silu": torch.nn.functional.silu(gate),
        "gelu": torch.nn.functional.gelu(gate, approximate="tanh"),
    }
    for operators in (compiled, TorchRows()):
        found = getattr(operators, f"{activation}_multiply")(gate_up.clone())
        torch.testing.assert_close(found.double(), activated[activation] * up, rtol=2e-6, atol=2e-6)

"""Stand-ins for Transformer Engine's kernels refuse what the kernels refuse, and what nobody wrote one for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rollcast.errors import CapabilityError, RollcastError
from rollcast_dryrun import te_kernels
from rollcast_dryrun.native import find_compiler
from rollcast_dryrun.process import MockProcess


def test_matrices_that_do_not_fit_are_refused() -> None:
    weight, rows = torch.empty(6, 4), torch.empty(2, 3, 5)
    arguments = (None, None, te_kernels.DType.kFloat32, None, te_kernels.DType.kFloat32, False, None, False)
    with pytest.raises(RuntimeError, match=r"\[6, 4\] \(True\) and \[2, 3, 5\] \(False\) have no product"):
        te_kernels.generic_gemm(weight, True, rows, False, *arguments, torch.empty(1), 1, False, False)


def test_a_rotary_embedding_of_packed_rows_needs_their_lengths() -> None:
    queries, frequencies = torch.empty(7, 2, 8), torch.empty(7, 1, 1, 8)
    with pytest.raises(RuntimeError, match="fused_rope_forward needs the lengths of packed rows"):
        te_kernels.fused_rope_forward(queries, frequencies, None, "NVTE_THD", False, None, 1, 0)
    with pytest.raises(RuntimeError, match=r"takes no \[7, 2, 8\]"):
        te_kernels.fused_rope_forward(queries, frequencies, None, "NVTE_SBHD", False, None, 1, 0)


def test_a_kernel_without_a_stand_in_is_named() -> None:
    with pytest.raises(CapabilityError, match="no stand-in for Transformer Engine's kernel moe_permute_fwd"):
        te_kernels.moe_permute_fwd()


@pytest.mark.skipif(find_compiler() is None, reason="a dry run needs a C++ compiler")
def test_a_package_without_what_it_imports_is_told_in_a_line(tmp_path: Path) -> None:
    package = tmp_path / "transformer_engine"
    for name, text in (("", ""), ("common", ""), ("pytorch", "import no_such_module")):
        (package / name).mkdir(parents=True, exist_ok=True)
        (package / name / "__init__.py").write_text(text)
    (package / "common" / "__init__.py").write_text("def load_framework_extension(name): ...")
    expected = r"^Transformer Engine is there without something that it imports: No module named 'no_such_module'; .*$"
    with MockProcess([tmp_path]) as process, pytest.raises(RollcastError, match=expected):
        process.call("builtins:len", [])

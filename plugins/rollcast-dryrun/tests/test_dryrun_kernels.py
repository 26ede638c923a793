"""Stand-ins for Transformer Engine's kernels refuse what the kernels refuse, and what nobody wrote one for."""

from __future__ import annotations

import pytest
import torch

from rollcast.errors import CapabilityError
from rollcast_dryrun import te_kernels


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

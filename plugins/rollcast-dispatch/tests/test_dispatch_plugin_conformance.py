"""The modes of rollcast-dispatch against the laws that every mode keeps."""

from __future__ import annotations

import pytest

from rollcast.testing import DispatchSuite
from rollcast_dispatch import NdMesh, make_nd_compute_dataproto_dispatch_fn


class TestDpComputeProto(DispatchSuite):
    name = "dp_compute_proto"


class TestNdMesh(DispatchSuite):
    name = "nd_mesh"


class TestMeshOfAnotherName(DispatchSuite):
    @pytest.fixture
    def mode(self) -> NdMesh:
        return make_nd_compute_dataproto_dispatch_fn("actor")

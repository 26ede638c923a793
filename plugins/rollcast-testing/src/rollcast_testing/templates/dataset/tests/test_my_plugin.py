import pytest

from rollcast.errors import DataError
from rollcast_data.testing import DatasetSuite
from rollcast_my_plugin import MyPlugin


class TestMyPlugin(DatasetSuite):
    name = "my_plugin"
    rows = 11

    def write(self, folder):
        (folder / "train.tsv").write_text("".join(f"{n}+{n}=\t{2 * n}\n" for n in range(11)))
        return [folder / "train.tsv"]


def test_a_bad_line_is_named(tmp_path):
    (tmp_path / "bad.tsv").write_text("1+1=\t2\n1+2=3\n")
    with pytest.raises(DataError, match=r"bad.tsv:2: .* no tab"):
        MyPlugin([tmp_path / "bad.tsv"], None, {})

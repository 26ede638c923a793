import pytest

from rollcast.errors import DataError
from rollcast_data.testing import PreprocessorSuite
from rollcast_my_plugin import MyPlugin


class TestMyPlugin(PreprocessorSuite):
    name = "my_plugin"
    columns = {"*": ("prompt", "ground_truth", "data_source")}
    uses_seed = True

    def write_source(self, folder):
        (folder / "questions.txt").write_text("".join(f"{n} + {n} = {2 * n}\n" for n in range(30)))
        return folder


def test_a_bad_line_is_named(tmp_path):
    (tmp_path / "questions.txt").write_text("1 + 1 = 2\n1 + 2\n")
    with pytest.raises(DataError, match=r"questions\.txt:2"):
        MyPlugin().run(tmp_path, tmp_path)

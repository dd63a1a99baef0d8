"""The operation that sums up over ranks, in graphs of its own."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import openvino as ov
from openvino import opset13 as op

from headrace.worker.model.rank_sum import SUM, RankSum


def graph(calls: list[tuple[int, tuple[int, ...]]]) -> ov.Model:
    """Two sums of what is put in, each of which adds its number, and notes its shape."""

    def add(number: int, part: npt.NDArray[np.float32], total: npt.NDArray[np.float32]) -> None:
        calls.append((number, part.shape))
        np.add(part, 10.0**number, out=total)

    put_in = op.parameter([-1, -1, 8], np.float32)
    first = RankSum([op.abs(put_in).output(0)], number=0, add=add)
    second = RankSum([op.negative(first).output(0)], number=1, add=add)
    return ov.Model([op.result(second)], [put_in], "sums")


def test_each_inference_has_sums_of_its_shape() -> None:
    calls: list[tuple[int, tuple[int, ...]]] = []
    compiled = ov.Core().compile_model(graph(calls), "CPU")
    request = compiled.create_infer_request()
    # As many numbers in another shape, too.
    for shape in ((2, 3, 8), (1, 6, 8), (6, 1, 8), (1, 1, 8), (3, 2, 8), (3, 2, 8)):
        values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
        calls.clear()
        request.infer([values])
        assert calls == [(0, shape), (1, shape)]
        np.testing.assert_array_equal(request.get_output_tensor().data, 10 - (values + 1))


def test_a_copy_of_the_graph_keeps_its_sums() -> None:
    calls: list[tuple[int, tuple[int, ...]]] = []
    copied = graph(calls).clone()
    sums = [node for node in copied.get_ordered_ops() if node.get_type_name() == SUM]
    assert [node.get_attributes()["number"] for node in sums] == [0, 1]
    ov.Core().compile_model(copied, "CPU").create_infer_request().infer([np.zeros((1, 2, 8), np.float32)])
    assert [number for number, _ in calls] == [0, 1]

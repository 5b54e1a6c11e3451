"""Models whose inputs a spec has to describe, each with one thing that `init` has to find out."""

import numpy as np

from tests.builders import parse


def copies(*inputs):
    """Returns a model that gives its inputs back, such as `float[batch, 3] x`.

    What they are can be told by name, type and shape alone.
    """
    pairs = [one.rsplit(" ", 1) for one in inputs]
    outputs = ", ".join(f"{kind} copy_{name}" for kind, name in pairs)
    nodes = " ".join(f"copy_{name} = Identity({name})" for _, name in pairs)
    return parse(f"({', '.join(inputs)}) => ({outputs}) {{ {nodes} }}")


def fixed_size_classifier(side):
    """`image` [batch, 3, height, width] → `scores`, which takes images of one size only."""
    return parse(
        """(float[batch, 3, height, width] image) => (float[batch, 5] scores) {
            conv = Conv <strides = [2, 2], kernel_shape = [2, 2]> (image, w)
            flat = Flatten(conv)
            scores = Gemm(flat, head)
        }""",
        w=np.ones((4, 3, 2, 2), np.float32),
        head=np.zeros((4 * (side // 2) ** 2, 5), np.float32),
    )


def skip_connection(stride):
    """`x` [1, 1, ?, ?] shrunk and grown by a stride and added to itself: sides have to be multiples of it."""
    return parse(
        f"""(float[1, 1, ?, ?] x) => (float[1, 2, H, W] y) {{
            small = MaxPool <kernel_shape = [{stride}, {stride}], strides = [{stride}, {stride}]> (x)
            large = Resize(small, , scales)
            y = Concat <axis = 1> (x, large)
        }}""",
        scales=np.array([1, 1, stride, stride], np.float32),
    )


def text_encoder():
    """`input_ids` and `attention_mask` [batch, sequence]; a table of positions bounds the sequence."""
    return parse(
        """(int64[batch, sequence] input_ids, int64[batch, sequence] attention_mask) => (float[B, S, 8] y)
        <int64 zero = {0}, int64 one = {1}, int64[1] last = {2}> {
            embedded = Gather(words, input_ids)
            length = Shape <start = 1, end = 2> (input_ids)
            limit = Squeeze(length)
            places = Range(zero, limit, one)
            placed = Gather(positions, places)
            hidden = Add(embedded, placed)
            mask = Cast <to = 1> (attention_mask)
            wide = Unsqueeze(mask, last)
            y = Mul(hidden, wide)
        }""",
        words=np.ones((30, 8), np.float32),
        positions=np.ones((20, 8), np.float32),
    )


def voice_detector():
    """`audio` [?, ?], `state` [2, ?, 4] and `sr`: a branch per sample rate."""
    return parse(
        """(float[?, ?] audio, float[2, ?, 4] state, int64 sr) => (float[2, B, 4] next)
        <int64[1] one = {1}, int64 rate = {16000}> {
            wave = Unsqueeze(audio, one)
            frames = Conv <kernel_shape = [64], strides = [32]> (wave, w)
            mean = ReduceMean <axes = [1, 2], keepdims = 0> (frames)
            is_fast = Equal(sr, rate)
            scaled = If (is_fast) <
                then_branch = fast () => (float[N] twice) { twice = Add(mean, mean) },
                else_branch = slow () => (float[N] same) { same = Identity(mean) }
            >
            next = Add(state, scaled)
        }""",
        w=np.ones((4, 1, 64), np.float32),
    )


def scaled_pixels():
    """`image` [1, 4, 4, 3] of float32 → `y` [1, 3, 4, 4], divided by 255 in the graph."""
    return parse(
        """(float[1, 4, 4, 3] image) => (float[1, 3, 4, 4] y) <float full = {255}> {
            first = Transpose <perm = [0, 3, 1, 2]> (image)
            y = Div(first, full)
        }"""
    )


def compared_one_hot():
    """`bytes` [?, 8] → `y` [?, 8, 257], compared with 0 to 256: a one-hot encoding as JAX exports it."""
    return parse(
        """(int32[batch, 8] bytes) => (float[batch, 8, 257] y)
        <int64[3] column = {-1, 8, 1}, int64[3] one = {1, 1, 1}> {
            rows = Reshape(bytes, column)
            wide = Expand(rows, one)
            is_class = Equal(wide, classes)
            y = Cast <to = 1> (is_class)
        }""",
        classes=np.arange(257, dtype=np.int32).reshape(1, 1, 257),
    )


def impossible():
    """`x` [rows, columns], of which no shape runs: it would need 15 elements and 16."""
    return parse(
        """(float[rows, columns] x) => (float[3, 5] first, float[2, 8] second)
        <int64[2] one = {3, 5}, int64[2] other = {2, 8}> {
            first = Reshape(x, one)
            second = Reshape(x, other)
        }"""
    )


def map_classifier():
    """`x` [1, 4] → `label` and `probabilities`, a list of maps as converters of scikit-learn make it."""
    return parse(
        """(float[1, 4] x) => (string[1] label, seq(map(string, float)) probabilities) {
            label, scores = ai.onnx.ml.LinearClassifier <
                classlabels_strings = ["no", "yes"],
                coefficients = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0],
                intercepts = [0.0, 1.0]
            > (x)
            probabilities = ai.onnx.ml.ZipMap <classlabels_strings = ["no", "yes"]> (scores)
        }"""
    )

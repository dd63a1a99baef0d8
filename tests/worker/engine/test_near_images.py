"""Images that are nearly equal, many pairs at once, from their files to answers: they never share a block of the KV
cache, a cached prefix or the states of an encoder. Equal ones share all of these."""

from __future__ import annotations

import itertools
import os
import random
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b

from headrace.common.vision.identity import pseudo_tokens
from headrace.protos.inference_pb2 import SamplingParams
from headrace.worker.request.images import ImageStates
from headrace.worker.request.request import Request, RequestState
from headrace.worker.server.admission import DecodedRequest, admit
from headrace.worker.vision.job import EncodeJob
from tests.hostile_images import png
from tests.worker.conftest import BLOCK_SIZE, VOCAB_SIZE
from tests.worker.engine.test_encoding import Setup
from tests.worker.fake_runner import expected_tokens
from tests.worker.images import FakeEncoder, states_of
from tests.worker.server.test_images import LIMITS, NUM_TOKENS, desk, message, tokens_of

SEED = int(os.environ.get("HEADRACE_SEED", "5"))
NUM_PAIRS, CHECK_EVERY = (10_000, 500) if os.environ.get("HEADRACE_SOAK") else (120, 1)
WIDTH = 256
"""Requests in flight. The images of all requests are in the caches at the end."""
TEXT, END = [1, 2, 3, 4, 5, 6, 7, 8, 9], [5, 6, 7, 8, 5, 6, 7]
MAX_TOKENS = 3
BLOCKS_PER_REQUEST = -(-(len(TEXT) + NUM_TOKENS + len(END) + MAX_TOKENS) // BLOCK_SIZE)


def true_name(data: bytes) -> bytes:
    """Identifies a file without what is tested."""
    return blake2b(data).digest()


class TrueEncoder(FakeEncoder):
    """Its states spell the file itself, so whoever gets those of another file answers wrongly."""

    def states(self, job: EncodeJob) -> ImageStates:
        return states_of(true_name(job.data), job.num_tokens)


def answer_about(data: bytes, text: Sequence[int]) -> list[int]:
    """The tokens that a request about this file behind a text must get."""
    return expected_tokens([*text, *pseudo_tokens(true_name(data), NUM_TOKENS), *END], MAX_TOKENS, VOCAB_SIZE)


# --- pairs -----------------------------------------------------------------------------------------------------------

_HEADER = 41
"""Bytes of a PNG file before its rows."""


def _file(draw: random.Random, width: int = 8, height: int = 8) -> bytes:
    return png(width, height, _rows(draw.randbytes(3 * width * height), width))


def _rows(pixels: bytes, width: int) -> bytes:
    """Rows that are stored as they are, so that files of one size have one length."""
    step = 3 * width
    return zlib.compress(b"".join(b"\0" + pixels[at : at + step] for at in range(0, len(pixels), step)), 0)


def _one_bit(draw: random.Random, data: bytes) -> bytes:
    found = bytearray(data)
    found[draw.randrange(_HEADER, len(data) - 12)] ^= 1 << draw.randrange(8)
    return bytes(found)


def _one_pixel(draw: random.Random, _: bytes) -> tuple[bytes, bytes]:
    pixels = bytearray(draw.randbytes(192))
    place = draw.randrange(192)
    other = pixels[:place] + bytes([pixels[place] ^ 1]) + pixels[place + 1 :]
    return png(8, 8, _rows(bytes(pixels), 8)), png(8, 8, _rows(bytes(other), 8))


def _all_but_an_eighth(_: random.Random, data: bytes) -> bytes:
    """As many bytes as some caches take samples of are the same."""
    return bytes(byte ^ 0xFF if at % 8 and _HEADER <= at < len(data) - 12 else byte for at, byte in enumerate(data))


def _turned_size(draw: random.Random, _: bytes) -> tuple[bytes, bytes]:
    """The same pixels in rows of another length."""
    pixels = draw.randbytes(3 * 10 * 30)
    return png(10, 30, _rows(pixels, 10)), png(30, 10, _rows(pixels, 30))


_NEAR: Sequence[Callable[[random.Random, bytes], bytes | tuple[bytes, bytes]]] = (
    _one_bit,
    _one_pixel,
    _all_but_an_eighth,
    _turned_size,
    lambda draw, data: data + draw.randbytes(1),
    lambda _, data: data + b"\0",
    lambda _, data: data[:-1],
    lambda _, data: data[:-1] + bytes([data[-1] ^ 1]),
    lambda _, data: data[:33] + b"\0\0\0\1tEXta\0\0\0\0" + data[33:],
)


def pairs(draw: random.Random) -> Iterator[tuple[bytes, bytes]]:
    """Pairs of files that differ in little, without end."""
    for near in itertools.cycle(_NEAR):
        data = _file(draw)
        found = near(draw, data)
        yield found if isinstance(found, tuple) else (data, found)


# --- requests --------------------------------------------------------------------------------------------------------


class Asking:
    """Asks about files, many at a time, and looks at every step who holds which block."""

    def __init__(self, num_requests: int, num_files: int) -> None:
        self.setup = Setup(
            num_blocks=num_requests * BLOCKS_PER_REQUEST,
            budget_tokens=num_files * NUM_TOKENS,
            encoder=TrueEncoder(),
            max_num_seqs=32,
            max_num_batched_tokens=1024,
        )
        self.file_of_hash: dict[int, bytes] = {}
        """The file that stands in each block of the cache, by the block's hash."""
        self._desk = desk(max_pixels=1_000_000)
        self._turns = itertools.count()

    def request(self, data: bytes, text: Sequence[int]) -> Request:
        """A request as it comes from the wire."""
        sampling = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
        decoded = DecodedRequest.of(message([*text, *tokens_of(data), *END], data, sampling=sampling))
        images = decoded.placed(self._desk.place)
        return self.setup.add(admit(decoded, LIMITS, request_id="r", arrival_s=self.setup.clock.now_s, images=images))

    def ask(self, files: Sequence[bytes], text: Sequence[int] = TEXT, *, works: bool = True) -> list[Request]:
        """Ask about each file behind a text, and hold each answer to its file."""
        requests: list[Request] = []
        in_flight: dict[Request, bytes] = {}
        while len(requests) < len(files) or in_flight:
            while len(requests) < len(files) and len(in_flight) < WIDTH:
                data = files[len(requests)]
                requests.append(self.request(data, text))
                in_flight[requests[-1]] = data
            if works:
                self.setup.encoder.work()
            self._turn()
            self._look(in_flight)
            in_flight = {
                request: data for request, data in in_flight.items() if request.state is not RequestState.FINISHED
            }
        self._turn()
        self._turn()
        for request, data in zip(requests, files, strict=True):
            assert self.setup.under_test.tokens.pop(request) == answer_about(data, text)
        self.setup.is_clean()
        return requests

    def _turn(self) -> None:
        self.setup.under_test.is_checked = next(self._turns) % CHECK_EVERY == 0
        self.setup.turn()

    def _look(self, in_flight: dict[Request, bytes]) -> None:
        """No block behind the text holds tokens of two files, neither now nor for those who find it by its hash."""
        holder: dict[int, bytes] = {}
        cache = self.setup.under_test.scheduler.kv_cache
        for request, data in in_flight.items():
            for index in range(len(TEXT) // BLOCK_SIZE, len(request.block_table)):
                assert holder.setdefault(request.block_table[index], data) == data
                if (index + 1) * BLOCK_SIZE <= request.num_computed_tokens:
                    assert self.file_of_hash.setdefault(cache.hash_of(request, index), data) == data


def test_near_equal_images_share_nothing_and_equal_ones_everything() -> None:
    draw = random.Random(SEED)
    found = list(itertools.islice(pairs(draw), NUM_PAIRS))
    different = list(dict.fromkeys(itertools.chain.from_iterable(found)))
    assert len(different) == 2 * NUM_PAIRS
    equal = draw.choices(different, k=NUM_PAIRS // 4)
    files = [*different, *equal]
    draw.shuffle(files)
    asking = Asking(len(files), len(different))
    requests = asking.ask(files)
    store, encoder = asking.setup.store, asking.setup.encoder
    assert encoder.num_encoded == len(different) == store.num_misses == len(store)
    count = Counter(files)
    for request, data in zip(requests, files, strict=True):
        assert count[data] > 1 or request.num_cached_tokens <= len(TEXT)
    # Equal ones found the blocks, or the states while the first one waited or ran.
    num_hits = store.num_hits
    assert 0 < num_hits <= len(equal)
    # All are in the caches now. A second turn takes each image from its blocks, and one behind another text from its
    # states.
    later = draw.sample(different, min(len(different), 2000))
    for request in asking.ask(later, works=False):
        assert request.num_cached_tokens >= len(TEXT) + NUM_TOKENS
    assert store.num_hits == num_hits
    for request in asking.ask(later, TEXT[::-1], works=False):
        assert request.num_cached_tokens <= len(TEXT)
    assert store.num_hits == num_hits + len(later)
    assert encoder.num_encoded == len(different)

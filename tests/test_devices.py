"""Which format and which native ops faked devices have; assume_device; what compiled code sees."""

import importlib.util
import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from expecttest import assert_expected_inline

from float8 import devices
from float8.devices import (
    OPS,
    assume_device,
    assumed_device,
    describe,
    device_profile,
    format_for,
)
from float8.formats import E4M3FN, E4M3FNUZ, E5M2, E5M2FNUZ

GPUS = [
    "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120",
    "gfx90a", "gfx942", "gfx950", "gfx1200", "gfx1201",
]  # fmt: skip
FNUZ = {"gfx942"}
NO_FP8 = {"sm_80", "sm_86", "gfx90a", "cpu"}
Fake = Callable[..., None]


def nvidia(major: int, minor: int, name: str = "NVIDIA Something") -> SimpleNamespace:
    return SimpleNamespace(name=name, major=major, minor=minor)


def amd(gcn: str, major: int, minor: int, name: str = "AMD Something") -> SimpleNamespace:
    return SimpleNamespace(name=name, major=major, minor=minor, gcnArchName=gcn)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    """fake(properties of cuda:0, of cuda:1, ..., hip="7.1" | None, cuda="13.0" | None, ...)."""

    def install(
        *gpus: SimpleNamespace,
        hip: str | None = None,
        cuda: str | None = "13.0",
        version: str = "2.13.0",
        build: str = "CXX_FLAGS= -DUSE_FBGEMM -DUSE_MSLK",
    ) -> None:
        def properties(device: torch.device) -> SimpleNamespace:
            return gpus[torch.device(device).index or 0]

        # A stand-in for what the module sees as `torch`, so that torch itself is not deceived.
        seen_as_torch = SimpleNamespace(
            device=torch.device,
            cuda=SimpleNamespace(
                is_available=lambda: bool(gpus),
                device_count=lambda: len(gpus),
                get_device_properties=properties,
            ),
            version=SimpleNamespace(hip=hip, cuda=None if hip else cuda),
            __version__=version,
            __config__=SimpleNamespace(show=lambda: build),
        )
        monkeypatch.setattr(devices, "torch", seen_as_torch)
        monkeypatch.setattr(devices, "_seen", SimpleNamespace(cpu=describe("cpu")))

    return install


def test_the_table() -> None:
    rows = [
        f"{p.arch:8}{p.vendor:7}{p.flavour:5}{p.matrix or '':10}{p.alignment:3}{p.wavefront:3} "
        f"{p.shared_memory // 1024:4}K {', '.join(op for op in OPS if op in p.native)}".rstrip()
        for p in (describe(arch) for arch in [*GPUS, "cpu"])
    ]
    assert_expected_inline(
        "\n".join(rows),
        """\
sm_80   nvidia fn               1 32  163K
sm_86   nvidia fn               1 32   99K
sm_89   nvidia fn   mma        16 32   99K convert, mm_tensorwise, mm_rowwise
sm_90   nvidia fn   wgmma      16 32  227K convert, mm_tensorwise, mm_rowwise, mm_blockwise, grouped
sm_100  nvidia fn   tcgen05    16 32  227K convert, mm_tensorwise, mm_rowwise, mm_mx
sm_103  nvidia fn   tcgen05    16 32  227K convert, mm_tensorwise, mm_rowwise, mm_mx
sm_120  nvidia fn   mma        16 32   99K convert, mm_tensorwise, mm_rowwise, mm_mx
gfx90a  amd    fn               1 64   64K
gfx942  amd    fnuz mfma       16 64   64K convert, mm_tensorwise, mm_rowwise, grouped
gfx950  amd    fn   mfma_scale 16 64  160K convert, mm_tensorwise, mm_rowwise, mm_mx, grouped
gfx1200 amd    fn   wmma       16 32   64K convert, mm_tensorwise
gfx1201 amd    fn   wmma       16 32   64K convert, mm_tensorwise
cpu     cpu    fn               1  1    0K""",
    )


@pytest.mark.parametrize("arch", [*GPUS, "cpu"])
def test_every_row_gives_reasons(arch: str) -> None:
    profile = describe(arch)
    assert (profile.flavour == "fnuz") == (arch in FNUZ)
    assert (not profile.native) == (arch in NO_FP8)
    assert arch in profile.why.lower() and profile.why.endswith(".")
    assert profile.alignment_note.endswith(".")
    for op in OPS:
        reason = profile.refusal(op)
        assert (reason is None) == (op in profile.native)
        assert reason is None or reason.endswith(".")
    assert hash(profile) == hash(describe(arch))


@pytest.mark.parametrize(
    ("gpu", "hip", "arch"),
    [
        (amd("gfx90a:sramecc+:xnack-", 9, 0), "7.1", "gfx90a"),  # the capability of an H100
        (amd("gfx942:sramecc+:xnack-", 9, 4), "7.1", "gfx942"),
        (amd("gfx950:sramecc+:xnack-", 9, 5), "7.1", "gfx950"),
        (amd("gfx1201", 12, 0), "7.1", "gfx1201"),  # the capability of an RTX 5090
        (nvidia(8, 0), None, "sm_80"),
        (nvidia(8, 6), None, "sm_86"),
        (nvidia(8, 9), None, "sm_89"),
        (nvidia(9, 0), None, "sm_90"),
        (nvidia(10, 0), None, "sm_100"),
        (nvidia(10, 3), None, "sm_103"),
        (nvidia(12, 0), None, "sm_120"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_a_gpu_is_recognised(fake: Fake, gpu: SimpleNamespace, hip: str | None, arch: str) -> None:
    fake(gpu, hip=hip)
    profile = device_profile("cuda:0")
    assert profile == device_profile(torch.device("cuda"))
    assert (profile.arch, profile.product) == (arch, gpu.name)
    assert profile.native == describe(arch).native
    assert profile.peak_bf16 is profile.peak_fp8 is profile.peak_source is None
    fnuz = arch in FNUZ
    assert format_for("cuda:0", "e4m3") is (E4M3FNUZ if fnuz else E4M3FN)
    assert format_for("cuda:0", "e5m2") is (E5M2FNUZ if fnuz else E5M2)
    assert format_for("cpu", "e4m3") is E4M3FN


def test_two_devices_of_one_process_answer_for_themselves(fake: Fake) -> None:
    fake(amd("gfx942:sramecc+:xnack-", 9, 4), amd("gfx950", 9, 5), hip="7.1")
    for _ in range(2):
        assert format_for("cuda:0", "e4m3") is E4M3FNUZ
        assert format_for("cuda:1", "e4m3") is E4M3FN
        assert format_for("cuda", "e5m2") is E5M2FNUZ
    assert device_profile("cuda:0").refusal("mm_mx") is not None
    assert device_profile("cuda:1").refusal("mm_mx") is None


def test_unknown_devices_are_emulated_and_say_so(fake: Fake) -> None:
    fake(nvidia(99, 9, "NVIDIA Next"))
    unknown = ["cuda:0", "cuda:1", "meta", "mps", "xpu:0"]
    for device in unknown:
        profile = device_profile(device)
        assert not profile.native and profile.vendor == "unknown" and profile.alignment == 1
        assert format_for(device, "e4m3") is E4M3FN
    fake()  # a CUDA tensor's device on a machine without a GPU, as under FakeTensorMode
    reasons = [device_profile(device).why for device in unknown]
    fake(nvidia(99, 9, "NVIDIA Next"))
    reasons.append(device_profile("cuda:0").why)
    fake(amd("gfx1151", 11, 5, "AMD Strix"), hip="7.1")
    reasons.append(device_profile("cuda:0").refusal("mm_rowwise") or "")
    assert_expected_inline(
        "\n".join(reasons),
        """\
Unknown device: cuda:0, which is not visible. FP8 is emulated in the FN formats.
Unknown device: cuda:1, which is not visible. FP8 is emulated in the FN formats.
Unknown device: type 'meta'. FP8 is emulated in the FN formats.
Unknown device: type 'mps'. FP8 is emulated in the FN formats.
Unknown device: type 'xpu'. FP8 is emulated in the FN formats.
Unknown device: NVIDIA Next, sm_999. FP8 is emulated in the FN formats.
Unknown device: AMD Strix, gfx1151.""",
    )


@pytest.mark.parametrize(
    ("gpu", "software", "missing"),
    [
        (nvidia(9, 0), {"cuda": "12.8"}, {"mm_blockwise"}),
        (nvidia(9, 0), {"cuda": "12.9"}, set()),
        (nvidia(9, 0), {"cuda": "13.0"}, set()),
        (nvidia(10, 0), {"cuda": "12.6"}, {"mm_mx"}),
        (nvidia(12, 0), {"cuda": "12.8"}, set()),
        (nvidia(8, 9), {"version": "2.11.0+cu130"}, {"mm_rowwise"}),
        (nvidia(8, 9), {"version": "2.12.0"}, set()),
        (amd("gfx950", 9, 5), {"hip": "6.4.1"}, {"mm_mx"}),
        (amd("gfx942", 9, 4), {"hip": "7.1", "build": "-DUSE_FBGEMM_GENAI"}, set()),
        (amd("gfx942", 9, 4), {"hip": "7.1", "build": "-DUSE_FBGEMM USE_MSLK=OFF"}, {"grouped"}),
    ],
)
def test_what_this_build_of_torch_lacks_is_refused(
    fake: Fake, gpu: SimpleNamespace, software: dict[str, str], missing: set[str]
) -> None:
    fake(gpu, **software)
    profile = device_profile("cuda:0")
    assert describe(profile.arch).native - profile.native == missing
    assert len(profile.refusals) == len(OPS) - len(profile.native)  # each once


@pytest.mark.parametrize(
    ("gpu", "bf16", "fp8"),
    [
        (nvidia(9, 0, "NVIDIA H200"), 989.4e12, 1978.9e12),
        (nvidia(9, 0, "NVIDIA H100 80GB HBM3"), 989.4e12, 1978.9e12),
        (nvidia(9, 0, "NVIDIA H100 PCIe"), 756e12, 1513e12),
        (nvidia(9, 0, "NVIDIA H200 NVL"), 835.5e12, 1670.5e12),
        (nvidia(9, 0, "NVIDIA H20"), 148e12, 296e12),
        (nvidia(9, 0, "NVIDIA H100 80GB HBM3 MIG 1g.10gb"), None, None),
        (nvidia(9, 0, "NVIDIA H100"), None, None),
        (nvidia(8, 0, "NVIDIA A100-SXM4-80GB"), 312e12, None),
        (nvidia(8, 9, "NVIDIA L4"), 121e12, 242.5e12),
        (nvidia(8, 9, "NVIDIA L40S"), 362.05e12, 733e12),
        (nvidia(8, 9, "NVIDIA GeForce RTX 4090"), 165.2e12, 330.3e12),
        (nvidia(8, 9, "NVIDIA GeForce RTX 4090 Laptop GPU"), None, None),
        (nvidia(8, 9, "NVIDIA GeForce RTX 4080"), None, None),
        (nvidia(10, 3, "NVIDIA GB300"), 2500e12, 5000e12),
        (nvidia(12, 0, "NVIDIA H200"), None, None),
    ],
    ids=lambda v: v.name if isinstance(v, SimpleNamespace) else "",
)
def test_peaks_are_those_of_the_product(
    fake: Fake, gpu: SimpleNamespace, bf16: float | None, fp8: float | None
) -> None:
    fake(gpu)
    profile = device_profile("cuda:0")
    assert (profile.peak_bf16, profile.peak_fp8) == (bf16, fp8)
    assert (profile.peak_source is None) == (bf16 is None)


def test_peaks_are_dense() -> None:
    """A datasheet's sparse number would be twice as large; FP8 is at most about twice bf16."""
    for arch, product, bf16, fp8, source in devices._PEAKS:
        assert arch in GPUS and source and 100 < bf16 < 3000, product
        assert fp8 is None or 1.9 < fp8 / bf16 < 2.1, product
        assert (fp8 is None) == (arch in NO_FP8), product


@pytest.mark.parametrize("arch", [*GPUS, "cpu"])
def test_assumed_devices_have_their_formats_and_nothing_native(arch: str) -> None:
    with assume_device(arch):
        for device in ("cpu", "cuda:3", "meta"):
            profile = device_profile(device)
            assert (profile.arch, profile.flavour) == (arch, describe(arch).flavour)
            assert not profile.native
            assert all(f"{arch} is assumed" in (profile.refusal(op) or "") for op in OPS)
        assert describe("sm_90").native  # the table's own row stays in reach
    assert device_profile("cpu").refusal("convert") == "torch has no fast FP8 on a CPU."


def test_assumptions_nest_and_end() -> None:
    assert assumed_device() is None
    with assume_device("gfx942"):
        with pytest.raises(ZeroDivisionError), assume_device("sm_90"):
            assert assumed_device() == "sm_90"
            assert format_for("cpu", "e4m3") is E4M3FN
            raise ZeroDivisionError
        assert assumed_device() == "gfx942"
        assert format_for("cpu", "e5m2") is E5M2FNUZ
    assert assumed_device() is None
    assert format_for("cpu", "e4m3") is E4M3FN

    @assume_device("gfx942")
    def decorated() -> str | None:
        return assumed_device()

    assert (decorated(), decorated(), assumed_device()) == ("gfx942", "gfx942", None)


def test_assumptions_survive_threads_that_interleave() -> None:
    """Ranks that are threads enter and leave in any order; none ends another's assumption."""
    entered, leave = threading.Event(), threading.Event()
    after: list[str | None] = []

    def other_rank() -> None:
        with assume_device("gfx942"):
            entered.set()
            leave.wait(10)
            after.append(assumed_device())

    thread = threading.Thread(target=other_rank)
    with assume_device("gfx942"):
        thread.start()
        entered.wait(10)
    leave.set()
    thread.join()
    assert after == ["gfx942"]
    assert assumed_device() is None


def test_errors_are_in_words() -> None:
    def text(function: Callable[[], object]) -> str:
        with pytest.raises(ValueError) as error:
            function()
        return str(error.value)

    messages = [
        text(lambda: format_for("cpu", "e8m0")),  # type: ignore[arg-type]
        text(lambda: assume_device("h100").__enter__()),
        text(lambda: describe("gfx900")),
        text(lambda: describe("cpu").refusal("mm")),  # type: ignore[arg-type]
    ]
    assert assumed_device() is None
    assert_expected_inline(
        "\n".join(messages),
        """\
No FP8 format of kind 'e8m0'; tensors are 'e4m3' or 'e5m2'.
Unknown architecture 'h100'; known are sm_80, sm_86, sm_89, sm_90, sm_100, sm_103, sm_120, gfx90a, gfx942, gfx950, gfx1200, gfx1201, cpu.
Unknown architecture 'gfx900'; known are sm_80, sm_86, sm_89, sm_90, sm_100, sm_103, sm_120, gfx90a, gfx942, gfx950, gfx1200, gfx1201, cpu.
'mm' is not an op of this table; those are convert, mm_tensorwise, mm_rowwise, mm_blockwise, mm_mx, grouped.""",  # noqa: E501
    )


@pytest.mark.parametrize(
    ("op", "expected"),
    [("mm_mx", "gfx942 has FNUZ FP8, and MX is made of OCP formats."), ("mm_rowwise", None)],
)
def test_why_gfx942_has_no_mx(op: devices.Op, expected: str | None) -> None:
    assert describe("gfx942").refusal(op) == expected


# What a layer asks while torch.compile traces it.
def cast(x: torch.Tensor) -> tuple[torch.Tensor, str, float, str | None, bool]:
    fmt, profile = format_for(x.device, "e4m3"), device_profile(x.device)
    data = x.clamp(-fmt.max, fmt.max).to(fmt.dtype)
    return data, fmt.name, fmt.max, profile.refusal("mm_mx"), "convert" in profile.native


def cast_as_gfx942(x: torch.Tensor) -> tuple[torch.Tensor, str | None, torch.Tensor, str | None]:
    with assume_device("gfx942"):
        inside, name = x.to(format_for(x.device, "e4m3").dtype), assumed_device()
    return inside, name, x.to(format_for(x.device, "e4m3").dtype), assumed_device()


def counting(backend: str) -> tuple[object, list[int]]:
    """The backend, and a list that grows with every graph it is given."""
    graphs: list[int] = []

    def compiler(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        graphs.append(1)
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    return compiler, graphs


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_code_is_guarded_on_what_is_assumed(backend: str) -> None:
    compiler, graphs = counting(backend)
    compiled = torch.compile(cast, fullgraph=True, backend=compiler)
    x = torch.tensor([-0.0, 1.0, 300.0])
    for _ in range(2):  # the second time round nothing is compiled
        for arch in (None, "gfx942", "gfx950"):
            if arch is None:
                got, expected = compiled(x), cast(x)
            else:
                with assume_device(arch):
                    got, expected = compiled(x), cast(x)
            assert got[0].dtype == expected[0].dtype
            assert got[0].view(torch.uint8).tolist() == expected[0].view(torch.uint8).tolist()
            assert got[1:] == expected[1:]
            assert got[1] == ("e4m3fnuz" if arch == "gfx942" else "e4m3fn")
        assert len(graphs) == 3


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_assume_device_inside_compiled_code(backend: str) -> None:
    compiled = torch.compile(cast_as_gfx942, fullgraph=True, backend=backend)
    x = torch.tensor([1.0])
    inside, name, outside, rest = compiled(x)
    assert (inside.dtype, name) == (E4M3FNUZ.dtype, "gfx942")
    assert (outside.dtype, rest) == (E4M3FN.dtype, None)
    assert assumed_device() is None
    with assume_device("sm_90"):
        assert compiled(x)[3] == "sm_90"
        assert assumed_device() == "sm_90"


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_asking_cuda_traces(fake: Fake, backend: str) -> None:
    """Several devices, all first met within one graph."""
    fake(amd("gfx942:sramecc+:xnack-", 9, 4, "AMD Instinct MI300X"), amd("gfx950", 9, 5), hip="7.1")

    def ask(x: torch.Tensor) -> tuple[torch.Tensor, list[object]]:
        answers: list[object] = []
        for device in (x.device, torch.device("cuda", 0), torch.device("cuda:1")):
            profile = device_profile(device)
            answers += [profile.arch, format_for(device, "e4m3").name, profile.peak_fp8]
            answers += [profile.refusal("mm_mx"), "mm_mx" in profile.native]
        return x + 1, answers

    compiled = torch.compile(ask, fullgraph=True, backend=backend)
    x = torch.ones(1)
    answers = compiled(x)[1]
    assert answers == ask(x)[1]
    assert answers[5:8] == ["gfx942", "e4m3fnuz", 2614.9e12]
    assert answers[10:12] == ["gfx950", "e4m3fn"]


def test_the_mark_on_the_probe_is_the_one_torch_makes() -> None:
    marked = torch.compiler.assume_constant_result(lambda: None)
    assert vars(marked).keys() <= vars(devices._probe).keys()


def test_checkpointing_recomputes_under_the_same_assumption() -> None:
    """CUDA runs the second forward on a thread of autograd's own; so does this, without CUDA."""
    seen: list[str] = []

    def ask() -> None:
        seen.append(format_for("cpu", "e4m3").name)

    with assume_device("gfx942"):
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
    assert seen == ["e4m3fnuz"]


def test_importing_asks_nothing_and_a_cpu_needs_no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("is_available", "device_count", "get_device_properties", "init"):
        monkeypatch.setattr(torch.cuda, name, lambda *args: pytest.fail("CUDA was asked"))
    spec = importlib.util.spec_from_file_location("float8.devices_again", devices.__file__)
    assert spec is not None and spec.loader is not None
    again = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(again)
    assert again.device_profile("cpu").arch == "cpu"
    with again.assume_device("gfx942"):
        assert again.device_profile("cuda").arch == "gfx942"

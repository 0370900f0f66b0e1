"""What a device is, which FP8 flavour it has, what it runs natively and, where it does not, why.

Every question names a device and is answered for that one: nothing is probed at import, nothing is
decided for the process. What torch supports is read off its ScaledBlas.cpp, RowwiseScaledMM.cu and
GroupedBlas.cpp; shared memory, wavefronts and matrix instructions off the CUDA programming guide,
the PTX ISA, AMD's table of GPU specifications and its ISA guides.
"""

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Literal

import torch

from .formats import FORMATS, Flavour, Float8Format

Vendor = Literal["nvidia", "amd", "cpu", "unknown"]
Op = Literal["convert", "mm_tensorwise", "mm_rowwise", "mm_blockwise", "mm_mx", "grouped"]
Matrix = Literal["mma", "wgmma", "tcgen05", "mfma", "mfma_scale", "wmma"]

OPS: tuple[Op, ...] = (
    "convert",  # instructions that round to FP8
    "mm_tensorwise",  # torch.nn.functional.scaled_mm, one scale per operand
    "mm_rowwise",  # one scale per row of a and per column of b
    "mm_blockwise",  # blocks 1x128 and 128x128
    "mm_mx",  # blocks 1x32 with E8M0 scales
    "grouped",  # torch.nn.functional.scaled_grouped_mm, rowwise
)


@dataclass(frozen=True)
class DeviceProfile:
    """One device, or one row of the architecture table (`describe`)."""

    arch: str  # "sm_90", "gfx942", "cpu", or "unknown"
    vendor: Vendor
    flavour: Flavour
    why: str  # one sentence: why this flavour
    refusals: tuple[tuple[Op, str], ...]  # an op that is not here runs natively
    alignment: int  # bytes; N and the contraction of an FP8 GEMM are multiples of it, M is free
    alignment_note: str
    wavefront: int  # threads that run in step; 1 where nothing is known
    shared_memory: int  # bytes that one workgroup can have
    matrix: Matrix | None = None  # matrix instructions for FP8, by the vendor's name
    product: str | None = None  # as the driver names it
    peak_bf16: float | None = None  # dense FLOP/s; None: unknown, and so is MFU
    peak_fp8: float | None = None
    peak_source: str | None = None

    def __hash__(self) -> int:  # caches ask at every cast; all fields would cost 5 us
        return hash(self.arch)

    @property
    def native(self) -> frozenset[Op]:
        """The ops that torch's own matmuls or the device's conversion instructions run."""
        return frozenset(OPS) - {op for op, _ in self.refusals}

    def refusal(self, op: Op) -> str | None:
        """Why `op` does not run natively, as a sentence; None when it does."""
        if op not in OPS:
            raise ValueError(f"{op!r} is not an op of this table; those are {', '.join(OPS)}.")
        return dict(self.refusals).get(op)


def _refuse_all(reason: str) -> tuple[tuple[Op, str], ...]:
    return tuple((op, reason) for op in OPS)


# cuBLASLt's rule, which scaled_mm checks for every vendor: multiples of 16 one-byte elements.
_NOTES: dict[Vendor, str] = {
    "nvidia": "K and N are multiples of 16, a is row-major and b column-major.",
    "amd": "K and N are multiples of 16; with MX blocks M is too, and K is a multiple of 128.",
}


def _gpu(
    arch: str, matrix: Matrix, wavefront: int, shared_kib: int, *refusals: tuple[Op, str]
) -> DeviceProfile:
    vendor: Vendor = "nvidia" if arch.startswith("sm_") else "amd"
    flavour: Flavour = "fnuz" if arch == "gfx942" else "fn"
    why, note = f"{arch} has the {flavour.upper()} formats.", _NOTES[vendor]
    return DeviceProfile(
        arch, vendor, flavour, why, refusals, 16, note, wavefront, shared_kib << 10, matrix
    )


def _emulated(
    arch: str, vendor: Vendor, reason: str, wavefront: int = 1, shared_kib: int = 0
) -> DeviceProfile:
    why, note = f"{reason} FP8 is emulated in the FN formats.", "Emulation takes every size."
    refusals = _refuse_all(reason)
    return DeviceProfile(arch, vendor, "fn", why, refusals, 1, note, wavefront, shared_kib << 10)


_OLD_SM = "has no FP8 instructions; they start with sm_89."
_NO_BLOCK: tuple[Op, str] = ("mm_blockwise", "torch multiplies 128-wide blocks on sm_90 only.")
_NO_MX: tuple[Op, str] = ("mm_mx", "torch multiplies MX blocks on sm_100, sm_103, sm_120, gfx950.")
_NO_FNUZ_MX: tuple[Op, str] = ("mm_mx", "gfx942 has FNUZ FP8, and MX is made of OCP formats.")
_NO_GROUPED: tuple[Op, str] = ("grouped", "torch groups FP8 rows on sm_90, gfx942, gfx950.")
_NO_ROW: tuple[Op, str] = ("mm_rowwise", "hipBLASLt's row scales are untested, and slow, on gfx12.")

_TABLE: dict[str, DeviceProfile] = {
    row.arch: row
    for row in (
        _emulated("sm_80", "nvidia", f"sm_80 {_OLD_SM}", 32, 163),
        _emulated("sm_86", "nvidia", f"sm_86 {_OLD_SM}", 32, 99),
        _gpu("sm_89", "mma", 32, 99, _NO_BLOCK, _NO_MX, _NO_GROUPED),
        _gpu("sm_90", "wgmma", 32, 227, _NO_MX),
        _gpu("sm_100", "tcgen05", 32, 227, _NO_BLOCK, _NO_GROUPED),
        _gpu("sm_103", "tcgen05", 32, 227, _NO_BLOCK, _NO_GROUPED),
        _gpu("sm_120", "mma", 32, 99, _NO_BLOCK, _NO_GROUPED),
        _emulated("gfx90a", "amd", "gfx90a has no FP8 instructions, gfx942 has.", 64, 64),
        _gpu("gfx942", "mfma", 64, 64, _NO_BLOCK, _NO_FNUZ_MX),
        _gpu("gfx950", "mfma_scale", 64, 160, _NO_BLOCK),
        _gpu("gfx1200", "wmma", 32, 64, _NO_ROW, _NO_BLOCK, _NO_MX, _NO_GROUPED),
        _gpu("gfx1201", "wmma", 32, 64, _NO_ROW, _NO_BLOCK, _NO_MX, _NO_GROUPED),
        _emulated("cpu", "cpu", "torch has no fast FP8 on a CPU."),
    )
}

# (architecture, words of the product's name, dense TFLOP/s in bf16 and FP8 with fp32 sums, source).
# The first row all of whose words occur is taken. A device that is an MI250X is half of the card.
_PEAKS: tuple[tuple[str, str, float, float | None, str], ...] = (
    ("sm_80", "A100", 312, None, "NVIDIA A100 datasheet"),
    ("sm_89", "L4", 121, 242.5, "NVIDIA L4 datasheet"),
    ("sm_89", "L40S", 362.05, 733, "NVIDIA L40S datasheet"),
    ("sm_89", "RTX 4090", 165.2, 330.3, "NVIDIA Ada GPU architecture whitepaper"),
    ("sm_90", "H100 HBM3", 989.4, 1978.9, "NVIDIA H100 SXM datasheet"),
    ("sm_90", "H100 PCIe", 756, 1513, "NVIDIA H100 PCIe datasheet"),
    ("sm_90", "H100 NVL", 835.5, 1670.5, "NVIDIA H100 NVL datasheet"),
    ("sm_90", "H200 NVL", 835.5, 1670.5, "NVIDIA H200 NVL datasheet"),
    ("sm_90", "H200", 989.4, 1978.9, "NVIDIA H200 SXM datasheet"),
    ("sm_90", "GH200", 989.4, 1978.9, "NVIDIA GH200 datasheet"),
    ("sm_90", "H20", 148, 296, "NVIDIA H20 datasheet"),
    ("sm_100", "B200", 2250, 4500, "NVIDIA HGX B200 datasheet"),
    ("sm_100", "GB200", 2500, 5000, "NVIDIA GB200 NVL72 datasheet"),
    ("sm_103", "B300", 2250, 4500, "NVIDIA HGX B300 datasheet"),
    ("sm_103", "GB300", 2500, 5000, "NVIDIA GB300 NVL72 datasheet"),
    ("sm_120", "RTX 5090", 209.5, 419, "NVIDIA RTX Blackwell GPU architecture whitepaper"),
    ("gfx90a", "MI250X", 191.5, None, "AMD MI250X datasheet"),
    ("gfx90a", "MI210", 181, None, "AMD MI210 datasheet"),
    ("gfx942", "MI300A", 980.6, 1961.2, "AMD MI300A datasheet"),
    ("gfx942", "MI300X", 1307.4, 2614.9, "AMD MI300X datasheet"),
    ("gfx942", "MI325X", 1307.4, 2614.9, "AMD MI325X datasheet"),
    ("gfx950", "MI350X", 2306.9, 4613.7, "AMD MI350X datasheet"),
    ("gfx950", "MI355X", 2516.6, 5033.2, "AMD MI355X datasheet"),
    ("gfx1201", "RX 9070 XT", 194.6, 389.3, "AMD RX 9070 XT product page"),
)
# Names that hold a listed one and are another thing: part of a card, a laptop's, an export model.
_NOT_THE_CARD = {"MIG", "Laptop", "D"}


def _version(text: str | None) -> tuple[int, ...]:
    """(12, 9) for "12.9"; () when the build has no such toolkit."""
    return tuple(int(n) for n in re.findall(r"\d+", text or "")[:2])


def _missing_software(row: DeviceProfile) -> Iterator[tuple[Op, str]]:
    """What the architecture can do and this build of torch cannot."""
    cuda = torch.version.cuda
    if row.arch == "sm_90" and _version(cuda) < (12, 9):
        yield "mm_blockwise", f"torch was built with CUDA {cuda}; 128-wide blocks need CUDA 12.9."
    if row.arch in ("sm_100", "sm_103", "sm_120") and _version(cuda) < (12, 8):
        yield "mm_mx", f"torch was built with CUDA {cuda}; MX blocks need CUDA 12.8."
    if row.arch == "sm_89" and _version(torch.__version__) < (2, 12):
        # pytorch/pytorch#177651: kernels out of order, or a hang, when another stream is current.
        reason = "torch before 2.12 launches it on the default stream, whichever is current."
        yield "mm_rowwise", reason
    if row.arch == "gfx950" and _version(torch.version.hip) < (7, 0):
        yield "mm_mx", f"torch was built with ROCm {torch.version.hip}; MX blocks need ROCm 7.0."
    if row.vendor == "amd" and not re.search("-DUSE_(MSLK|FBGEMM_GENAI)", torch.__config__.show()):
        yield "grouped", "torch was built without MSLK, which has its grouped matmul on ROCm."


def _profile(arch: str, product: str) -> DeviceProfile:
    """The table's row, less what this build of torch lacks, with the product's peaks."""
    row = _TABLE[arch]
    refused = {op for op, _ in row.refusals}
    missing = tuple((op, why) for op, why in _missing_software(row) if op not in refused)
    row = replace(row, refusals=row.refusals + missing, product=product)
    words = set(re.findall(r"\w+", product))
    for peak_arch, name, bf16, fp8, source in _PEAKS:
        if arch == peak_arch and words.issuperset(name.split()) and not words & _NOT_THE_CARD:
            fp8 = None if fp8 is None else fp8 * 1e12
            return replace(row, peak_bf16=bf16 * 1e12, peak_fp8=fp8, peak_source=source)
    return row


_seen = SimpleNamespace(cpu=_TABLE["cpu"])  # profiles by the keys that _probe returns
_keys: dict[tuple[object, torch.device], str] = {}  # asking CUDA takes 10 us: once a device


def _probe(device: torch.device) -> str:
    """Ask the device. Capability is not enough: gfx90a, without FP8, says 9.0 as an H100 does."""
    if device.type == "cpu":
        return "cpu"
    asked = (torch.cuda.get_device_properties, device)  # whom, too: a test may put a fake there
    if asked in _keys:
        return _keys[asked]
    arch, product = "unknown", f"type {device.type!r}"
    if device.type == "cuda":
        product = f"{device}, which is not visible"
        if torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count():
            properties = torch.cuda.get_device_properties(device)
            arch, product = f"sm_{properties.major}{properties.minor}", properties.name
            if torch.version.hip:
                arch = properties.gcnArchName.split(":")[0]  # "gfx942:sramecc+:xnack-"
    key = re.sub(r"\W", "_", f"{arch}_{product}")
    if not hasattr(_seen, key):
        unknown = product if arch == "unknown" else f"{product}, {arch}"
        known = _profile(arch, product) if arch in _TABLE else None
        setattr(_seen, key, known or _emulated(arch, "unknown", f"Unknown device: {unknown}."))
    if arch != "unknown" and device.index is not None:  # "cuda" alone is the current device
        _keys[asked] = key
    return key


# torch.compile calls it while it traces and takes the answer, a string, as a constant. This is all
# that torch.compiler.assume_constant_result does, besides importing torch._dynamo (2 seconds).
_probe._dynamo_marked_constant = True  # type: ignore[attr-defined]

# A plain list: Dynamo guards on it, and a forward that activation checkpointing repeats on
# autograd's own thread sees it too, as it would not see a threading.local.
_assumed: list[str] = []
_ASSUMED_PROFILES = {
    arch: replace(row, refusals=_refuse_all(f"{arch} is assumed; PyTorch's reference runs."))
    for arch, row in _TABLE.items()
}


def describe(arch: str) -> DeviceProfile:
    """The table's row of an architecture, whatever this machine is; ValueError if there is none."""
    if arch not in _TABLE:
        raise ValueError(f"Unknown architecture {arch!r}; known are {', '.join(_TABLE)}.")
    return _TABLE[arch]


def device_profile(device: torch.device | str) -> DeviceProfile:
    """What `device` is, or what it is assumed to be. An unknown device has nothing native."""
    if _assumed:
        return _ASSUMED_PROFILES[_assumed[-1]]
    profile: DeviceProfile = getattr(_seen, _probe(torch.device(device)))
    return profile


_BY_KIND = {(f.kind, f.flavour): f for f in FORMATS}


def format_for(device: torch.device | str, kind: Literal["e4m3", "e5m2"]) -> Float8Format:
    """The format of `kind` that `device` has, or that emulation takes there."""
    if kind not in ("e4m3", "e5m2"):
        raise ValueError(f"No FP8 format of kind {kind!r}; tensors are 'e4m3' or 'e5m2'.")
    return _BY_KIND[kind, device_profile(device).flavour]


@contextlib.contextmanager
def assume_device(name: str) -> Iterator[None]:
    """Within the block every device answers as architecture `name` ("gfx942", "sm_90", "cpu", ...).

    Formats are that architecture's, bit for bit; nothing is native, so the PyTorch reference runs.
    Blocks nest. Compiled functions are guarded on it. ValueError when `name` is unknown.
    """
    _assumed.append(describe(name).arch)
    try:
        yield
    finally:
        # The last entry of this name, which need not be the last: another thread may be inside too.
        del _assumed[len(_assumed) - 1 - _assumed[::-1].index(name)]


def assumed_device() -> str | None:
    """The innermost name given to `assume_device`, or None."""
    return _assumed[-1] if _assumed else None

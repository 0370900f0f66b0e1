"""Train a small GPT in bf16 and in FP8 on the same batches, and compare loss, speed and memory.

    python examples/train_gpt.py                         tiny, bf16 and rowwise, for two CPU cores
    python examples/train_gpt.py --recipe bf16 tensorwise rowwise rowwise_wgrad_hp blockwise mxfp8
    python examples/train_gpt.py --assume-device gfx942  FP8 as AMD's MI300 has it (FNUZ), emulated
    python examples/train_gpt.py --preset small --compile --cuda-graph --steps 1000 --last 100
                                                         125M parameters, for a GPU
    python examples/train_gpt.py --data my_text/ --save runs/mine --save-every 100

Every recipe starts from the same weights and sees the same batches. Parameters stay float32 and the
forward pass runs under bf16 autocast; all that an FP8 run has more is one line,
`float8.convert(model, recipe)`. A training writes to its folder (--out): <recipe>.jsonl with the
settings, a line per step and a closing summary; loss.png with all curves; losses.json with the
closing losses and their gaps to bf16; TensorBoard files on request. Ctrl-C saves a checkpoint and
says how to go on; a resumed run is bit for bit the uninterrupted one (on a GPU with
--deterministic).
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.metadata
import math
import os
import platform
import shlex
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

# Before torch is imported: its CPU threads then sleep while they wait for each other. They spin by
# default, which on two cores that other programs use made training 3 to 6 times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import checkpoint
import torch
from data import Text
from gpt import GPT, GPTConfig
from report import LAST, Log, Outputs, Record, plot, print_table, save_losses, table
from torch import Tensor, nn

import float8
from float8 import testing
from float8.devices import DeviceProfile

VALIDATION_BATCHES = 8
EAGER_STEPS = 3  # before a step is captured: they compile, and make the optimiser's state
Batches = list[tuple[Tensor, Tensor]]  # of a step: tokens and targets of each micro-batch


@dataclass(frozen=True)
class Preset:
    """What --preset sets. Each field has a flag of its name, which overrides it."""

    layers: int
    dim: int
    heads: int
    hidden: int
    seq_len: int
    batch_size: int
    steps: int
    warmup: int
    lr: float
    kv_heads: int | None = None

    def model(self) -> GPT:
        """Raises ValueError where the sizes make no model."""
        sizes = self.layers, self.dim, self.heads, self.hidden
        return GPT(GPTConfig(*sizes, kv_heads=self.kv_heads))


@dataclass(frozen=True)
class Example:
    """A program that trains as this one does, with models of its own (train_moe.py)."""

    file: str
    about: str
    presets: Mapping[str, Preset]
    model: str  # in the plot's title, and in the name of its folder


PRESETS = {
    "tiny": Preset(4, 128, 4, 352, seq_len=128, batch_size=8, steps=120, warmup=20, lr=2e-3),
    "small": Preset(10, 1024, 8, 2688, seq_len=1024, batch_size=32, steps=500, warmup=50, lr=6e-4),
    # Blocks as in Llama 3.2 1B, and 4 of the 32 of Llama 3 8B, with a vocabulary of bytes.
    "1b": Preset(16, 2048, 32, 8192, seq_len=2048, batch_size=8, steps=500, warmup=50, lr=3e-4,
                 kv_heads=8),
    "8b-layers": Preset(4, 4096, 32, 14336, seq_len=8192, batch_size=1, steps=100, warmup=20,
                        lr=3e-4, kv_heads=8),
}  # fmt: skip
EXAMPLE = Example(__file__, __doc__, PRESETS, "GPT")


@dataclass(frozen=True)
class Job:
    """What the recipes of one command share."""

    args: argparse.Namespace
    setup: Preset
    text: Text
    device: torch.device
    profile: DeviceProfile  # of the real device, whatever is assumed: MFU is judged against it
    outputs: Outputs
    save: Path
    save_asked: bool


@dataclass
class Captured:
    """A step's work on the GPU, that replays as one launch, and where it reads and writes."""

    graph: torch.cuda.CUDAGraph
    batches: Batches
    results: tuple[Tensor, Tensor]


@dataclass
class Run:
    """One recipe in training. It has done as many steps as its record has rows."""

    record: Record
    model: GPT
    optimizer: torch.optim.Optimizer
    whole: bool = True  # False while the weights are ahead of the rows: no state to save
    # With --cuda-graph:
    lr: Tensor | None = None  # where the captured update reads it
    eager: int = 0  # steps done without a graph
    captured: Captured | None = None


def build(record: Record, job: Job) -> Run:
    """Model, conversion and optimizer of one recipe. The seed alone decides the first weights."""
    if job.device.type == "cuda":
        gc.collect()  # the last recipe's model, which must not count as this one's memory
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(job.device)
    torch.manual_seed(job.args.seed)
    with job.device:
        model = job.setup.model()
    if record["recipe"] != "bf16":
        float8.convert(model, float8.RECIPES[record["recipe"]])
    if job.args.compile:
        torch.compiler.reset()  # or the last recipe's graphs would count towards the limit
        for block in model.blocks:
            block.compile(fullgraph=True)
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    on_gpu = job.device.type == "cuda"
    optimizer = torch.optim.AdamW(
        groups, lr=job.setup.lr, betas=(0.9, 0.95), fused=on_gpu, capturable=on_gpu
    )
    lr = torch.zeros((), device=job.device) if job.args.cuda_graph else None
    return Run(record, model, optimizer, lr=lr)


def learning_rate(step: int, setup: Preset, schedule: str) -> float:
    """Linear warm-up, then constant, or a cosine down to a tenth at the last step."""
    if step < setup.warmup:
        return setup.lr * (step + 1) / setup.warmup
    if schedule == "constant":
        return setup.lr
    done = (step - setup.warmup) / max(1, setup.steps - 1 - setup.warmup)
    return setup.lr * (0.55 + 0.45 * math.cos(math.pi * done))


def weights_cast_once(run: Run, micro_batches: int) -> contextlib.AbstractContextManager[None]:
    """Micro-batches share the FP8 copies of the weights; the results are the same bits."""
    if run.record["recipe"] == "bf16" or micro_batches == 1:
        return contextlib.nullcontext()
    return float8.cached_weights(run.model)


def update(run: Run, job: Job, batches: Batches) -> tuple[Tensor, Tensor]:
    """Each micro-batch forward and backward, clip, update: the loss and the gradients' norm."""
    run.optimizer.zero_grad()
    losses = []
    with weights_cast_once(run, len(batches)):
        for tokens, targets in batches:
            with torch.autocast(job.device.type, torch.bfloat16):
                loss = run.model(tokens, targets) / len(batches)
            loss.backward()
            losses.append(loss.detach())
    norm = nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
    run.whole = False
    run.optimizer.step()
    return torch.stack(losses).sum(), norm


def capture(run: Run, job: Job, batches: Batches) -> Captured:
    """Record an update as a CUDA graph. Nothing is computed yet."""
    graph, batches = torch.cuda.CUDAGraph(), [(x.clone(), y.clone()) for x, y in batches]
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        results = update(run, job, batches)
    return Captured(graph, batches, results)


def replay(run: Run, job: Job, batches: Batches) -> tuple[Tensor, Tensor]:
    """An update by a CUDA graph, which the first call captures."""
    if run.captured is None:
        run.captured = capture(run, job, batches)
    for kept, new in zip(run.captured.batches, batches, strict=True):
        for into, given in zip(kept, new, strict=True):
            into.copy_(given)
    run.whole = False
    run.captured.graph.replay()
    return run.captured.results


def set_learning_rate(run: Run, lr: float) -> None:
    if run.lr is not None:
        run.lr.fill_(lr)
    for group in run.optimizer.param_groups:
        group["lr"] = lr if run.lr is None else run.lr


def train_step(run: Run, job: Job) -> dict[str, Any]:
    """One step: draw the batches, update. Adds its row to the record."""
    began, setup, step = time.perf_counter(), job.setup, len(run.record["rows"])
    lr = learning_rate(step, setup, job.args.schedule)
    set_learning_rate(run, lr)
    batches = [
        job.text.batch(f"{job.args.seed}/{step}/{micro}", setup.batch_size, setup.seq_len)
        for micro in range(job.args.accumulate)
    ]
    if job.args.cuda_graph and run.eager == EAGER_STEPS:
        results = replay(run, job, batches)
    else:
        results = update(run, job, batches)
        run.eager += 1
    loss, grad_norm = (result.item() for result in results)  # waits for the device
    tokens_done = job.args.accumulate * setup.batch_size * setup.seq_len
    tokens_per_s = tokens_done / (time.perf_counter() - began)
    row = dict(step=step, loss=loss, lr=lr, grad_norm=grad_norm, tokens_per_s=tokens_per_s)
    run.record["rows"].append(row)
    run.whole = True
    return row


@torch.no_grad()
def validation_loss(run: Run, job: Job) -> float:
    size, length = job.setup.batch_size, job.setup.seq_len
    losses = []
    for tokens, targets in job.text.validation_batches(VALIDATION_BATCHES, size, length):
        with torch.autocast(job.device.type, torch.bfloat16):
            losses.append(run.model(tokens, targets).item())
    return statistics.fmean(losses)


def utilisation(flops_per_s: float, peak: float | None) -> float | None:
    """Achieved over peak FLOP/s (MFU); None where the device's peak is not known."""
    return flops_per_s / peak if peak else None


def summary(run: Run, job: Job) -> dict[str, Any]:
    """The closing numbers of a run: what the table shows."""
    rows, on_gpu = run.record["rows"], job.device.type == "cuda"
    speeds = [row["tokens_per_s"] for row in rows]
    speed = statistics.median(speeds[3:] or speeds)  # the first steps compile and warm up
    flops = run.model.flops_per_token(job.setup.seq_len)
    layers = float8.summary(run.model)
    return {
        "loss": statistics.fmean(row["loss"] for row in rows[-job.args.last :]),
        "validation_loss": validation_loss(run, job),
        "tokens_per_s": speed,
        "flops_per_token": flops,
        "mfu_bf16": utilisation(speed * flops, job.profile.peak_bf16),
        "mfu_fp8": utilisation(speed * flops, job.profile.peak_fp8) if layers.fp8 else None,
        "peak_memory_bytes": torch.cuda.max_memory_allocated(job.device) if on_gpu else None,
        "fp8_layers": layers.fp8,
        "all_layers": len(layers.layers),
        "layers": str(layers),  # with the implementation that each product took
    }


def stream_of_its_own(job: Job) -> contextlib.AbstractContextManager[Any]:
    """What --cuda-graph wants: a graph is captured in the stream that the steps before ran in, and
    that cannot be the default one."""
    if not job.args.cuda_graph:
        return contextlib.nullcontext()
    stream = torch.cuda.Stream(job.device)
    stream.wait_stream(torch.cuda.current_stream(job.device))
    return torch.cuda.stream(stream)


@contextlib.contextmanager
def ctrl_c_after_the_step() -> Iterator[Callable[[], None]]:
    """Hold the first Ctrl-C until the yielded function is called; a second one acts at once."""
    pending = False

    def check() -> None:
        if pending:
            raise KeyboardInterrupt

    def hold(signum: int, frame: object) -> None:
        nonlocal pending
        check()
        pending = True
        print("\nCtrl-C: finishing this step first (again to stop at once)", file=sys.stderr)

    if threading.current_thread() is not threading.main_thread():  # handlers can be set only there
        yield check
        return
    before = signal.signal(signal.SIGINT, hold)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, before)


def train(run: Run, job: Job) -> None:
    """Train to the last step, log each, save when asked. KeyboardInterrupt passes, state saved."""
    record, steps, every = run.record, job.setup.steps, job.args.save_every
    log = Log(job.outputs, record, steps)
    try:
        with ctrl_c_after_the_step() as check_ctrl_c, stream_of_its_own(job):
            while len(record["rows"]) < steps:
                row = train_step(run, job)
                log.step(row)
                if not math.isfinite(row["loss"] + row["grad_norm"]):
                    record["stopped"] = f"step {row['step']} has a loss of {row['loss']} and a "
                    record["stopped"] += f"gradient norm of {row['grad_norm']}"
                    print(f"{record['recipe']}: stopped, {record['stopped']}; try a smaller --lr")
                    break  # the last checkpoint is better than this state
                if every and len(record["rows"]) % every == 0:
                    checkpoint.save(job.save, record, run.model, run.optimizer)
                check_ctrl_c()
            record["summary"] = summary(run, job)
            log.finish(record)
            if job.save_asked and not record["stopped"]:
                checkpoint.save(job.save, record, run.model, run.optimizer)
            check_ctrl_c()
    except KeyboardInterrupt:
        if run.whole:
            checkpoint.save(job.save, record, run.model, run.optimizer)
        else:
            print(f"{record['recipe']}: stopped inside an update, which leaves nothing to save")
        raise
    finally:
        log.close()


def resume_or_start(recipe: str, job: Job) -> Run | Record:
    """A run, at its first step or where its checkpoint was made; a record where all is done."""
    record, folder, steps = new_record(recipe, job), job.args.resume, job.setup.steps
    state = checkpoint.load(folder, record, steps) if folder else None
    if state is None:
        return build(record, job)
    record.update({key: state["record"][key] for key in ("rows", "summary", "stopped")})
    done = len(record["rows"])
    if record["summary"] and (record["stopped"] or done >= steps):
        print(f"{recipe}: all its {done} steps are done")
        Log(job.outputs, record, steps).finish(record)
        if job.save != folder:
            checkpoint.write(job.save, state)
        return record
    print(f"{recipe}: going on after {done} steps")
    run = build(record, job)
    checkpoint.restore(state, run.model, run.optimizer)
    return run


def train_all(job: Job) -> dict[str, Record]:
    """Each recipe in turn. KeyboardInterrupt passes, with all that a resumed run needs saved."""
    records: dict[str, Record] = {}
    unsaved: list[Record] = []
    try:
        for recipe in job.args.recipe:
            run = resume_or_start(recipe, job)
            if isinstance(run, Run):
                train(run, job)
                run = run.record
                if not job.save_asked:
                    unsaved.append(run)
            records[recipe] = run
    except KeyboardInterrupt:
        for record in unsaved:
            checkpoint.save_record(job.save, record)
        raise
    return records


def introduce(job: Job) -> None:
    """Print what is about to be trained, on what."""
    setup, text, profile = job.setup, job.text, job.profile
    with torch.device("meta"):
        parameters = sum(p.numel() for p in job.setup.model().parameters())
    shared = f" ({setup.kv_heads} of keys and values)" if setup.kv_heads else ""
    size = len(text.train) + len(text.validation)
    peak = f", peak FLOP/s from the {profile.peak_source}" if profile.peak_source else ""
    formats = " and ".join(float8.format_for(job.device, kind).name for kind in ("e4m3", "e5m2"))
    print(
        f"model: {setup.layers} layers, width {setup.dim}, {setup.heads} heads{shared}, hidden "
        f"width {setup.hidden}: {parameters / 1e6:.2f}M parameters\n"
        f"text: {text.source}, {size:,} bytes, the last tenth held out "
        f"(sha256 {text.sha256[:12]})\n"
        f"device: {profile.product or job.device}{peak}\n"
        f"FP8: {formats}; {float8.device_profile(job.device).why}\n"
        f"writing to {job.outputs.folder}"
    )


def positive(kind: Callable[[str], float]) -> Callable[[str], float]:
    """A converter for argparse: what `kind` makes of the text, if that is above 0."""

    def convert(text: str) -> float:
        value = kind(text)
        if not value > 0:
            raise argparse.ArgumentTypeError(f"{text} is not above 0")
        return value

    convert.__name__ = kind.__name__  # argparse says "invalid int value"
    return convert


def command_line(example: Example) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=os.path.basename(example.file),
        description=example.about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--recipe",
        nargs="+",
        choices=("bf16", *float8.RECIPES),
        default=["bf16", "rowwise"],
        help="one or several, trained in turn (default: bf16 rowwise)",
    )
    presets = example.presets
    add("--preset", choices=presets, default="tiny", help="sizes and settings (default: tiny)")
    for f in fields(presets["tiny"]):
        kind = positive(float if f.type == "float" else int)
        add(f"--{f.name.replace('_', '-')}", type=kind, metavar="N", help="instead of the preset's")
    add("--schedule", choices=("constant", "cosine"), default="constant", help="after --warmup")
    add("--accumulate", type=positive(int), default=1, metavar="N", help="batches per step")
    add(
        "--last",
        type=positive(int),
        default=LAST,
        metavar="N",
        help="steps that the closing loss is the mean of (default: %(default)s)",
    )
    add("--seed", type=int, default=0, help="of the first weights and of the batches (default: 0)")
    add("--data", metavar="PATH", help="a file or folder (default: Python's standard library)")
    gpu = torch.cuda.is_available()
    add("--device", default="cuda" if gpu else "cpu", help="default: %(default)s")
    add("--assume-device", metavar="NAME", help="emulate this device's FP8, such as gfx942")
    add("--compile", action="store_true", help="torch.compile each block, fullgraph")
    add("--cuda-graph", action="store_true", help="replay each step as one launch, on a GPU")
    add("--deterministic", action="store_true", help="kernels that give the same bits each time")
    add("--out", type=Path, metavar="DIR", help="default: runs/<a name made of the settings>")
    add("--save", type=Path, metavar="PATH", help="checkpoint folder (default: DIR/checkpoints)")
    add("--save-every", type=positive(int), metavar="N", help="steps between checkpoints")
    add("--resume", type=Path, metavar="PATH", help="checkpoint folder to go on from")
    add("--tensorboard", action="store_true", help="write event files to DIR/tensorboard")
    return parser


def prepare(args: argparse.Namespace, example: Example) -> Job:
    """What the flags ask for. Raises ValueError, in words, where it cannot be had."""
    setup = example.presets[args.preset]
    given = {f.name: getattr(args, f.name) for f in fields(setup)}
    setup = replace(setup, **{k: v for k, v in given.items() if v is not None})
    with torch.device("meta"):
        setup.model()
    if args.device.partition(":")[0] not in ("cpu", "cuda"):
        raise ValueError(f"--device {args.device}: it must be cpu, or cuda for a GPU (AMD's too)")
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {args.device}: PyTorch sees no GPU here; use --device cpu")
    if args.cuda_graph and device.type != "cuda":
        raise ValueError("--cuda-graph: a CPU has no such graphs; leave it out, or use a GPU")
    text = Text.load(args.data, setup.seq_len, device)
    model = example.model.lower()
    name = [model, args.preset, *args.recipe, args.assume_device or device.type, f"seed{args.seed}"]
    folder = args.out or Path("runs", "-".join(name))
    return Job(
        args=args,
        setup=setup,
        text=text,
        device=device,
        profile=float8.device_profile(device),
        outputs=Outputs(folder, args.tensorboard),
        save=args.save or args.resume or folder / "checkpoints",
        save_asked=bool(args.save or args.save_every),
    )


def versions(device: torch.device) -> dict[str, Any]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    found = {"python": platform.python_version(), "torch": str(torch.__version__), "device": name}
    for package in ("float8", "triton"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return {**found, "threads": torch.get_num_threads()}


def new_record(recipe: str, job: Job) -> Record:
    """An empty record. Its settings decide the losses: a checkpoint must agree on all of them."""
    args = job.args
    setup = {name: value for name, value in asdict(job.setup).items() if value is not None}
    if args.schedule == "constant":
        del setup["steps"]  # no loss depends on their number: a resumed training may go further
    settings = {
        "recipe": recipe,
        **setup,
        "schedule": args.schedule,
        "accumulate": args.accumulate,
        "seed": args.seed,
        "assumed device": args.assume_device,
        "text": job.text.sha256,
    }
    return {
        "recipe": recipe,
        "planned": args.recipe,
        "settings": settings,
        "run": {
            "device": str(job.device),
            "compile": args.compile,
            "cuda graph": args.cuda_graph,
            "source": job.text.source,
        },
        "versions": versions(job.device),
        "rows": [],
        "summary": None,
        "stopped": None,
    }


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Only kernels that give the same bits each time; on a GPU attention's backward is not one."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    with testing.deterministic():
        yield


def main(argv: list[str] | None = None, example: Example = EXAMPLE) -> dict[str, Any]:
    """Train as `argv` says: {"out": folder, "runs": {recipe: record}}. Ctrl-C exits with 130."""
    argv = sys.argv[1:] if argv is None else argv
    parser = command_line(example)
    args = parser.parse_args(argv)
    args.recipe = list(dict.fromkeys(args.recipe))
    with contextlib.ExitStack() as stack:
        try:
            job = prepare(args, example)
            if args.assume_device:
                stack.enter_context(float8.assume_device(args.assume_device))
            for recipe in args.recipe if args.resume else ():  # refusals before any training
                checkpoint.load(args.resume, new_record(recipe, job), job.setup.steps)
        except (ValueError, OSError) as error:
            parser.exit(2, f"{parser.prog}: error: {error}\n")
        if args.deterministic:
            stack.enter_context(deterministic())
        if not args.resume:
            checkpoint.set_aside(job.save, args.recipe)
        introduce(job)
        try:
            records = train_all(job)
        except KeyboardInterrupt:
            command = ["python", os.path.relpath(example.file), *argv, "--resume", str(job.save)]
            saved = any(job.save.glob("*.pt"))
            print(f"Interrupted. Go on with: {shlex.join(command)}" if saved else "Interrupted.")
            raise SystemExit(130) from None
    if job.outputs.matplotlib:
        numerics = f" with FP8 as {args.assume_device} has it" if args.assume_device else ""
        where = f"{job.profile.product or job.device}{numerics}"
        title = f"{args.preset} {example.model}, seed {args.seed}, on {where}"
        plot(records, title, job.outputs.folder / "loss.png", args.last)
    save_losses(records, job.outputs.folder / "losses.json", args.last)
    print_table(table(records, args.last))
    return {"out": job.outputs.folder, "runs": records}


if __name__ == "__main__":
    sys.exit(any(record["stopped"] for record in main()["runs"].values()))

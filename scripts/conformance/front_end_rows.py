"""The rows of the table of `real_front_end.py`."""

from __future__ import annotations

import signal
from collections import Counter
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Tuple

from conformance.front_end_runs import Bench, Run, difference

_PROGRAM = """
import horovod.torch as hvd, popdist, popdist.poptorch, poptorch, torch

hvd.init()

class Step(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def forward(self, inputs, labels):
        return poptorch.identity_loss(torch.nn.functional.cross_entropy(self.layer(inputs), labels), "mean")

torch.manual_seed(1)
step = Step()
hvd.broadcast_parameters(step.state_dict(), root_rank=0)
options = popdist.poptorch.Options()
model = poptorch.trainingModel(step, options, poptorch.optim.SGD(step.parameters(), lr=0.5))
torch.manual_seed(popdist.getInstanceIndex())
inputs = torch.randn(8, 4)
losses = [float(model(inputs, (inputs[:, 0] > 0).long()).mean()) for _ in range(20)]
weights = hvd.allgather(step.layer.weight.detach().reshape(1, -1).clone())
assert popdist.getNumInstances() == 2 and torch.equal(weights[0], weights[1]), weights
assert losses[-1] < losses[0], losses
"""
_LIMITS = {"32.32": 1e-4, "16.32": 5e-3, "16.16": 2e-2}
_COMPARED = 4  # the update after which weights are compared: rounding grows by a factor of up to 10 per update
_SHORT = ("--lr-schedule", "constant", "--checkpoint-every", f"{_COMPARED} updates", "--keep-checkpoints", "100")
_ONE = ("--fleet", "inline", "--num-instances", "1", "--replicas", "1")
_TWO = ("--num-instances", "2", "--replicas", "2")
_DISTURBED = (*_TWO, "--updates", "60", "--checkpoint-every", "10 updates")  # runs in which something fails
_SNAPSHOTS = 4  # updates between two snapshots, in a run that writes no checkpoint before its end
_RESET = (
    'cd "$FRONT_END_FOLDER" && test "$RAYPOD_RECOVERY_ACTION" = PARTITION_RESET && '
    "for lock in device-*.lock; do flock -n $lock true || exit 9; done && rm broken-partition"
)
_LANGUAGE = ("--task", "language-model", "task.size=tiny", "task.max_mb=0.1", "--optimizer", "adamw")
_LANGUAGE += ("--learning-rate", "0.005")


class Outcome(NamedTuple):
    """One row. `problem`: what is wrong, or empty. `apart`: the distance of the weights from those expected."""

    run: Run
    problem: str
    apart: Optional[float] = None
    has_losses: bool = True


class Times(NamedTuple):
    """Seconds of the calls and loads that keep the interpreter lock, and of a hang."""

    held_s: float
    hang_s: float


Row = Callable[[Bench, Times], Outcome]


def _like_emulated(
    flags: Tuple[str, ...], precision: str = "32.32", updates: int = 24, moves: Mapping[str, int] = {}
) -> Row:
    """A training that is compared with the same one on the emulated SDK. `moves`: how many times the core does what."""

    def row(bench: Bench, _times: Times) -> Outcome:
        words = ["--batch-size", "16", "--learning-rate", "0.02", *_SHORT, *flags, "--precision", precision]
        run = bench.train([*words, "--updates", str(updates)], {"FRONT_END_COMPILE_S": "1"})
        emulated = bench.train([*words, "--updates", str(_COMPARED)], device="emulated")
        apart = difference(run, emulated, _COMPARED)
        done = Counter(event["event"] for event in run.core())
        other = ", ".join(
            f"{name} {done[name]} x, not {count} x" for name, count in moves.items() if done[name] != count
        )
        return Outcome(run, _problem(run, 0, apart, _LIMITS[precision]) or other, apart)

    return row


def _problem(run: Run, code: int, apart: Optional[float] = None, limit: Optional[float] = None) -> str:
    if run.code != code:
        lines = [line for line in run.output.splitlines() if line.strip()]
        return f"exit code {run.code}: {lines[-1] if lines else 'no output'}"
    if not run.falls():
        return "the loss does not fall"
    if limit is not None and apart is None:
        return "there are no weights to compare"
    if limit is not None and apart is not None and not apart <= limit:
        return f"the weights differ by {apart:.1e}, more than {limit:.0e}"
    return ""


def _resume(bench: Bench, _times: Times) -> Outcome:
    flags = [*_ONE, *_LANGUAGE, "task.dropout=0.1", "--lr-schedule", "cosine", "--updates", "40"]
    flags += ["--checkpoint-every", "20 updates"]
    whole = bench.train(flags)
    checkpoint = whole.folder / "checkpoints" / "update-00000020"
    run = bench.train([*flags, "--resume", str(checkpoint), "--run-dir", str(bench.folder / "resumed")])
    run = run._replace(folder=bench.folder / "resumed")
    apart = difference(run, whole)
    return Outcome(run, _problem(run, 0, apart, 0.0), apart)


def _preemption(bench: Bench, _times: Times) -> Outcome:
    flags = [*_TWO, *_LANGUAGE, "task.dropout=0.1", "--updates", "60"]
    whole = bench.undisturbed(flags)
    with bench.started(flags, {"FRONT_END_CALL_S": "0.2"}) as running:
        running.wait_for_calls(20)
        running.signal(signal.SIGTERM)
        first = running.wait()
    if first.code != 130:
        return Outcome(first, f"SIGTERM: exit code {first.code}")
    if any("Fatal Python error" in text for text in [first.output, *_logs(first)]):
        return Outcome(first, "SIGTERM prints stacks")
    with bench.started(["--resume", str(first.folder)], folder=first.folder) as running:
        run = running.wait()
    apart = difference(run, whole)
    return Outcome(run, _problem(run, 0, apart, 0.0), apart)


def _logs(run: Run) -> List[str]:
    return [path.read_text(errors="replace") for path in run.folder.glob("logs/*")]


def _held(setting: str) -> Row:
    """A call, or a load, that keeps the interpreter lock, with default settings: nothing is lost."""

    def row(bench: Bench, times: Times) -> Outcome:
        run = bench.train([*_TWO, "--updates", "3"], {f"FRONT_END_{setting}": str(times.held_s)})
        lost = run.events("instance_lost")
        problem = "" if run.code == 0 else _problem(run, 0)
        return Outcome(run, f"{len(lost)} instances are lost: {lost[0]}" if lost else problem, has_losses=False)

    return row


def _lost_peer(fault: str, action: str = "IPU_RESET", resets: bool = False) -> Row:
    """An instance is killed in a call; the survivor's call ends as `fault` says, with a recovery action.

    `resets`: there is a reset command, which fails while a process holds a device.
    """

    def row(bench: Bench, times: Times) -> Outcome:
        environment = {"FRONT_END_FAULT": fault, "FRONT_END_HOST_SYNC_S": str(times.hang_s), "FRONT_END_CALL_S": "0.1"}
        environment["FRONT_END_RECOVERY_ACTION"] = action
        flags = [*_DISTURBED, *(("--reset-command", _RESET) if resets else ())]
        with bench.started(flags, environment) as running:
            running.wait_for_calls(30)
            running.kill_instance(1)
            run = running.wait()
        if fault == "unrecoverable" or action == "FULL_RESET":
            return Outcome(run, _gave_up(run, "then the same command continues"))
        if fault == "partition" and not resets:
            return Outcome(run, _gave_up(run, "the SDK requires PARTITION_RESET: --reset-command executes it"))
        outcome = _recovered(bench, run)
        if resets and not outcome.problem and not any(event["reset_on"] for event in run.events("repaired")):
            return outcome._replace(problem="the reset command was not executed")
        return outcome

    return row


def _gave_up(run: Run, hint: str) -> str:
    actions = [event["recovery_action"] for event in run.events("instance_lost") if event["kind"] == "device"]
    is_told = bool(actions) and hint in run.output
    return "" if run.code == 1 and is_told else f"exit code {run.code}, recovery actions {actions}: {run.output[-300:]}"


def _recovered(bench: Bench, run: Run) -> Outcome:
    apart = difference(run, bench.undisturbed(_DISTURBED))
    problem = _problem(run, 0, apart, 0.0)
    if not problem and not run.events("instance_lost"):
        problem = "no instance is lost"
    if not problem and bench.raypod("verify-data", str(run.folder)):
        problem = "verify-data: not every sample was used once"
    return Outcome(run, problem, apart)


def _lost_peer_with_snapshots(bench: Bench, _times: Times) -> Outcome:
    """The run goes back to a snapshot, and repeats no more updates than lie between two of them."""
    flags = [*_TWO, "--updates", "60", "--snapshot-every", str(_SNAPSHOTS), "--checkpoint-every", "1000 updates"]
    with bench.started(flags, {"FRONT_END_FAULT": "unusable", "FRONT_END_CALL_S": "0.1"}) as running:
        running.wait_for_calls(30)
        running.kill_instance(1)
        run = running.wait()
    outcome = _recovered(bench, run)
    sources = [event["seeded_from"] for event in run.events("repaired")]
    repeated = sum(count - 1 for count in run.calls().values())
    if not outcome.problem and not any("snapshot" in source for source in sources):
        return outcome._replace(problem=f"it continues from {sources}")
    if not outcome.problem and repeated > _SNAPSHOTS:
        return outcome._replace(problem=f"{repeated} updates are repeated, more than {_SNAPSHOTS}")
    return outcome


def _lost_coordinator(bench: Bench, _times: Times) -> Outcome:
    with bench.started(_DISTURBED, {"FRONT_END_CALL_S": "0.1"}) as running:
        running.wait_for_calls(50)
        running.signal(signal.SIGKILL)
        first = running.wait()
    with bench.started(["--resume", str(first.folder)], folder=first.folder) as running:
        run = running.wait()
    apart = difference(run, bench.undisturbed(_DISTURBED))
    return Outcome(run, _problem(run, 0, apart, 0.0), apart)


def _sets(flags: Tuple[str, ...], expected: Mapping[str, Any]) -> Row:
    """A training of one update, whose session options are compared with those expected; None: it is not set."""

    def row(bench: Bench, _times: Times) -> Outcome:
        run = bench.train([*_ONE, *flags, "--updates", "1"])
        found = run.options()
        wrong = [f"{name} is {found.get(name)}" for name, value in expected.items() if found.get(name) != value]
        problem = "" if run.code == 0 else _problem(run, 0)
        return Outcome(run, problem or "; ".join(wrong), has_losses=False)

    return row


def _launch(bench: Bench, _times: Times) -> Outcome:
    program = bench.folder / "program.py"
    program.write_text(_PROGRAM)
    run = bench.launch(["--num-replicas", "2", "--num-instances", "2"], ["python", str(program)])
    return Outcome(run, "" if run.code == 0 else f"exit code {run.code}: {run.output[-300:]}", has_losses=False)


def _launch_tests(bench: Bench, _times: Times) -> Outcome:
    test = str(bench.folder / "tests" / "popdist_test.py")
    words = ["python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "--noconftest", "-c", "/dev/null", test]
    run = bench.launch(["--ipus-per-replica", "2"], words)
    return Outcome(run, "" if run.code == 0 else f"exit code {run.code}: {run.output[-300:]}", has_losses=False)


_VIT = (*_ONE, "--model", "vit_tiny", "--optimizer", "adamw", "--learning-rate", "0.001")
_PIPELINE = ("--ipus-per-replica", "2", "--pipeline-balance", "parameters", "--gradient-accumulation", "4")

_IPU = (
    *("--execution", "sharded", "--io-tiles", "32", "--overlap-io", "accumulation-loop", "--prefetch-depth", "3"),
    *("--recomputation", "all", "--recomputation-checkpoints", "features.[3-5]", "--off-chip", "optimizer"),
    *("--replicated-tensor-sharding", "weights", "--available-memory-proportion", "0.2", "--no-stable-norm"),
    *("--floating-point-exceptions", "--engine-option", "opt.internalExchangeOptimisationTarget=memory"),
    *("--popart", "outlineThreshold=10.0", "--popart-pattern", "TiedGather=true"),
)
_HALF = ("--precision", "16.16", "--loss-scaling", "128")
_COLLECTIVES = "replicatedCollectivesSettings"
_LOCATIONS = ("optimizer", "weight", "activation", "accumulator")
# Each option of the section `ipu` is in a row, with the session option that Graphcore's applications set for it.
_OPTIONS: Dict[str, Row] = {
    "defaults of 16.16, 2 replicas": _sets(
        (*_HALF, "--replicas", "2", "--gradient-accumulation", "2"),
        {
            "enableStochasticRounding": True,
            "partialsTypeMatMuls": "half",
            "convolutionOptions.partialsType": "half",
            "accumulateOuterFragmentSettings.schedule": 0,
            f"{_COLLECTIVES}.prepareScheduleForMergingCollectives": True,
            f"{_COLLECTIVES}.mergeAllReduceCollectives": True,
            "disableGradAccumulationTensorStreams": True,
            "disableOptimizerStateTensorStreams": None,
            "engineOptions.target.deterministicWorkers": "portable",
            "autoRecomputation": None,
        },
    ),
    "numerics": _sets(
        (
            *("--precision", "16.16", "--no-stochastic-rounding", "--partials", "float", "--automatic-loss-scaling"),
            *("--no-stable-norm", "--floating-point-exceptions", "--accumulator-streams", "--replicas", "2"),
            "--no-merged-all-reduces",
        ),
        {
            "enableStochasticRounding": False,
            "partialsTypeMatMuls": "float",
            "convolutionOptions.partialsType": "float",
            "automaticLossScalingSettings.enabled": True,
            "enableStableNorm": False,
            "enableFloatingPointChecks": True,
            "disableGradAccumulationTensorStreams": None,
            "accumulateOuterFragmentSettings.schedule": None,
            f"{_COLLECTIVES}.mergeAllReduceCollectives": None,
        },
    ),
    "memory": _sets(
        (
            *(*_HALF, "--replicas", "2", "--available-memory-proportion", "0.2", "--recomputation", "all"),
            *("--recomputation-checkpoints", "features.[3-5]", "--off-chip", "optimizer,weights,activations"),
            *("--replicated-tensor-sharding", "optimizer,weights,accumulators", "--off-chip-min-elements", "3"),
            *("--sharding-min-elements", "4"),
        ),
        {
            "available_memory_proportion.0": 0.2,
            "autoRecomputation": 4,
            "explicitRecomputation": True,
            "operators.recomputation_checkpoint": 3,
            **{f"location_{name}.onChip": int(name == "accumulator") for name in _LOCATIONS},
            **{f"location_{name}.useReplicatedTensorSharding": int(name != "activation") for name in _LOCATIONS},
            "location_optimizer.minElementsForOffChip": 3,
            "location_optimizer.minElementsForReplicatedTensorSharding": 4,
        },
    ),
    "accumulators off chip, norms": _sets(
        ("--gradient-accumulation", "2", "--off-chip", "accumulators", "--recomputation", "norms"),
        {"location_accumulator.onChip": 0, "location_optimizer.onChip": None, "autoRecomputation": 2},
    ),
    "recomputation standard, profile": _sets(
        ("--recomputation", "standard", "--ipu-profile", "profile", "--synthetic-data-on-device"),
        {
            "autoRecomputation": 1,
            "explicitRecomputation": True,
            "engineOptions.autoReport.all": "true",
            "syntheticDataMode": 2,
        },
    ),
    "pipeline": _sets(
        (*_PIPELINE, "--recomputation", "pipeline", "--available-memory-proportion", "0.1,0.3"),
        {
            "available_memory_proportion.0": 0.1,
            "available_memory_proportion.1": 0.3,
            "autoRecomputation": 3,
            "explicitRecomputation": None,
        },
    ),
    "input and output, any option": _sets(
        (
            *("--execution", "sharded", "--io-tiles", "32", "--overlap-io", "accumulation-loop"),
            *("--prefetch-depth", "3", "--engine-option", "opt.internalExchangeOptimisationTarget=memory"),
            *("--popart", "outlineThreshold=10.0", "--popart-pattern", "TiedGather=true"),
        ),
        {
            "numIOTiles": 32,
            "operators.set_overlap_for_input": 2,
            "defaultPrefetchBufferingDepth": 3,
            "engineOptions.opt.internalExchangeOptimisationTarget": "memory",
            "outlineThreshold": 10.0,
            "patterns.TiedGather": True,
        },
    ),
}
ROWS: Dict[str, Row] = {
    "default, one instance": _like_emulated(_ONE),
    "default, 2 instances": _like_emulated(_TWO),
    "default, 2 instances of 2 replicas": _like_emulated(("--num-instances", "2", "--replicas", "4")),
    "adam": _like_emulated((*_ONE, "--optimizer", "adam", "--learning-rate", "0.002")),
    "adamw, clipping": _like_emulated(
        (*_ONE, "--optimizer", "adamw", "--learning-rate", "0.002", "--max-grad-norm", "1.0")
    ),
    "lamb": _like_emulated((*_ONE, "--optimizer", "lamb", "--learning-rate", "0.02")),
    "rmsprop": _like_emulated((*_ONE, "--optimizer", "rmsprop", "--learning-rate", "0.002")),
    "rmsprop as in TensorFlow": _like_emulated((*_ONE, "--optimizer", "rmsprop", "--rmsprop-tf")),
    "options of the section ipu": _like_emulated((*_ONE, *_IPU, "--loss-scaling", "128"), "16.16"),
    **{f"session options: {name}": row for name, row in _OPTIONS.items()},
    "resnet 16.32": _like_emulated(_ONE, "16.32"),
    "resnet 16.16": _like_emulated((*_ONE, "--loss-scaling", "128"), "16.16"),
    "vit 32.32": _like_emulated(_VIT),
    "vit 16.32": _like_emulated(_VIT, "16.32"),
    "vit 16.16": _like_emulated((*_VIT, "--loss-scaling", "128"), "16.16"),
    "language model 32.32": _like_emulated((*_ONE, *_LANGUAGE)),
    "language model 16.32": _like_emulated((*_ONE, *_LANGUAGE), "16.32"),
    "language model 16.16": _like_emulated((*_ONE, *_LANGUAGE, "--loss-scaling", "128"), "16.16"),
    "accumulation 2 x iterations 2": _like_emulated(
        (*_ONE, "--gradient-accumulation", "2", "--device-iterations", "2")
    ),
    "reduction sum": _like_emulated(
        (*_TWO, "--reduction", "sum", "--gradient-accumulation", "2", "--learning-rate", "0.005")
    ),
    "ema": _like_emulated((*_ONE, "--ema", "0.9")),
    "ema every 3 updates": _like_emulated(
        (*_ONE, "--ema", "0.9", "--ema-every", "3"),
        moves={"weights to host": 12},  # 6 x for checkpoints, 2 x for both
    ),
    "pipeline over 2 IPUs": _like_emulated((*_ONE, *_PIPELINE)),
    "evaluation every epoch and after": _like_emulated(
        (*_ONE, "--batch-size", "64", "--evaluate-every", "1"),
        updates=44,
        moves={"attach": 4, "weights to host": 12, "optimizer to host": 12, "weights to device": 4},
    ),
    "save and resume with dropout": _resume,
    "preemption": _preemption,
    "long call": _held("CALL_S"),
    "long load": _held("LOAD_S"),
    "peer killed, the call raises": _lost_peer("raise"),
    "peer killed, unrecoverable": _lost_peer("unrecoverable"),
    "peer killed, full reset": _lost_peer("unusable", "FULL_RESET"),
    "peer killed, the device is unusable": _lost_peer("unusable"),
    "peer killed, the device is unusable, snapshots": _lost_peer_with_snapshots,
    "peer killed, the call hangs": _lost_peer("hang"),
    "partition reset": _lost_peer("partition", resets=True),
    "partition reset, no command": _lost_peer("partition"),
    "SIGKILL of the coordinator": _lost_coordinator,
    "launch a popdist program": _launch,
    "launch PopTorch's tests of popdist": _launch_tests,
}

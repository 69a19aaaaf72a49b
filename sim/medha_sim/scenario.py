"""Deployments to simulate: a model on hardware in a topology, and the replicas derived from it.

The `ReplicaConfig` is built as `medha up` derives it from a manifest and its ranks: unless the manifest says
otherwise, a prompt is long where attention FLOPs exceed linear FLOPs, and KV gets what weights leave of
`memory_fraction`. If it speculates, controllers get guesses that are right with the deployment's `acceptance`
(`medha_sim.guesses`), and a draft model or head takes time and memory of the rank that samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from medha.api.fields import quantity_bytes
from medha.api.replica import MedhaReplicaSpec, SchedulingSpec, ServiceClass
from medha.api.replica_role import ReplicaRole
from medha.cost.cost_profile import Profile
from medha.cost.hardware import A100, HARDWARE, LLAMA3_8B, MODELS, Hardware, ModelShape, profile_for
from medha.cost.predictor import TOKENS_PER_LANE, Chunking, Predictor
from medha.errors import ConfigInvalid
from medha.kv.store_tier import object_blocks
from medha.model.kv_dtype import kv_element_bytes
from medha.routing.replica_demand import DemandTerms
from medha.routing.router_core import RouterCore
from medha.scheduler.controller import ReplicaController
from medha.scheduler.replica_config import ReplicaConfig
from medha.topology import Topology
from medha.wire.messages import Announce, DiskTierFigures, HostTierFigures, StepProfile
from medha_sim.autoscaling import AutoscaledFleet, AutoscalerTerms, Signal
from medha_sim.draft_times import DraftShape, DraftTimes, alone, with_head
from medha_sim.executor import Executor, Guesser, Perturbed, PredictorCost, StepCost
from medha_sim.guesses import ACCEPTANCE, LookupGuesser, ProposingGuesser, Texts
from medha_sim.head_shape import HeadShape, mtp_shape, read_eagle3_shape
from medha_sim.lengths import Counts
from medha_sim.plan import DISK_ACCESS_SECONDS, DISK_BYTES_PER_SECOND
from medha_sim.simulation import Latencies, SimulatedReplica, Simulation, Workload
from medha_sim.workloads import Targets

MODEL_NAME = "simulated"
DIGEST = "simulated"
MAX_CHUNK_TOKENS = 8192
"""Largest chunk by default: an A100 pod needs chunks of this size to be fully efficient beside decodes."""


MAX_MODEL_LEN_TOKENS = 1_100_000
"""Maximum model length by default: it holds the longest Medha-SWE request and its answer."""

_POINTS = tuple(64 * 4**power for power in range(10))
"""Prompt lengths for which a replica announces its prefill times to routers."""


def default_scheduling() -> SchedulingSpec:
    return SchedulingSpec(max_chunk_tokens=MAX_CHUNK_TOKENS)


@dataclass(frozen=True, slots=True)
class Disturbance:
    """Difference between the ground truth and the controller's profile."""

    bias: float = 1.0  # factor on the time of every step
    noise: float = 0.0  # standard deviation of each step's log-normal factor of mean one


@dataclass(frozen=True, slots=True)
class Deployment:
    """A number of identical replicas."""

    model: ModelShape = LLAMA3_8B
    hardware: Hardware = A100
    topology: Topology = field(default_factory=lambda: Topology(tensor=8, stream=2))
    scheduling: SchedulingSpec = field(default_factory=default_scheduling)
    service_classes: tuple[ServiceClass, ...] = (ServiceClass(name="default"),)
    max_model_len: int = MAX_MODEL_LEN_TOKENS
    memory_fraction: float = 0.9  # of a device, for weights and KV
    kv_bytes: int | None = None  # of KV on each rank; None: what the weights leave
    measured: Profile | None = None  # by `medha profile`; None: derived from the hardware
    block_size_tokens: int = 16
    tokens_per_lane: int = TOKENS_PER_LANE
    prefix_caching: bool = True
    host_bytes: int = 0  # of the host tier of each rank; 0: evicted KV is forgotten
    disk_bytes: int = 0  # of the disk tier of each rank; 0: there is none
    disk_bytes_per_second: float = DISK_BYTES_PER_SECOND  # that a rank reads, or writes
    store_bytes_per_second: float = 0.0  # that a rank reads of the store, or writes; 0: there is none
    peer_bytes_per_second: float = 0.0  # that a rank reads of another replica's; 0: none reads
    roles: tuple[ReplicaRole, ...] = ()  # of each replica in turn; empty: all do both
    replicas: int = 1
    # Time that a replica which drains has for its requests; None: as long as they take.
    drain_seconds: float | None = None
    message_seconds: float = 0.0002  # between a controller and its ranks, one way
    latencies: Latencies = field(default_factory=lambda: Latencies(replica_seconds=0.0005))
    draft: DraftShape | None = None  # the draft model or head of `scheduling.speculation`
    acceptance: float = ACCEPTANCE  # chance that a guess is right

    def __post_init__(self) -> None:
        method = self.scheduling.speculation.method
        if not 0 <= self.acceptance <= 1:
            raise ConfigInvalid(
                f"acceptance is {self.acceptance:g}; it is the chance that a guess is right, so give a number from 0 to 1"
            )
        found = "none"
        if self.draft is not None:
            found = "a head" if isinstance(self.draft, HeadShape) else "a draft model"
        wanted = {"draftModel": "a draft model", "predictionHead": "a head"}.get(method, "none")
        if found != wanted:
            raise ConfigInvalid(
                f"scheduling.speculation.method is {method}, so the deployment's draft must be {wanted}, not {found}; give the "
                "shape that proposes the guesses, or choose another method"
            )
        if self.draft is not None and self.measured is not None:
            raise ConfigInvalid(
                f"scheduling.profile is {self.measured.name!r}, and scheduling.speculation.method is {method}; a profile has the "
                "times of the served model alone, so leave it out, or set method to promptLookup or none"
            )

    @property
    def guesses(self) -> bool:
        """True if tokens are guessed."""
        return self.scheduling.speculation.method != "none"

    def profile(self) -> Profile:
        """Return the step costs that the controllers assume."""
        if self.measured is not None:
            return self.measured
        profile = profile_for(self.model, self.hardware, self.topology)
        if isinstance(self.draft, HeadShape):
            return with_head(profile, alone(self.draft, self.hardware))
        return profile

    def kv_tokens(self) -> int:
        """Return the tokens of KV that one lane holds.

        Raises:
            ConfigInvalid: the weights alone do not fit.
        """
        token_bytes = self._rank_token_bytes
        if self.kv_bytes is not None:
            return int(self.kv_bytes / token_bytes)
        ranks = self.topology.tensor * self.topology.stream
        weights_bytes = self.model.weights_bytes / ranks
        name = self.model.name
        if (
            self.draft is not None
        ):  # the rank that samples has least left, and all pools have its number of blocks
            weights_bytes += self.draft.weights_bytes
            name += f" with {self.draft.name}"
        free_bytes = self.memory_fraction * self.hardware.memory_bytes - weights_bytes
        if free_bytes <= 0:
            raise ConfigInvalid(
                f"{name} needs {weights_bytes / 1e9:.0f} GB of weights on each of {ranks} ranks; "
                f"{self.memory_fraction:g} of {self.hardware.name} is "
                f"{self.memory_fraction * self.hardware.memory_bytes / 1e9:.0f} GB. Use more tensor or stream ranks"
            )
        return int(free_bytes / token_bytes)

    @property
    def _rank_token_bytes(self) -> float:
        """Bytes of KV of a token on one rank; with a draft model or head, on the one that samples."""
        shares = self.topology.stream * min(self.topology.tensor, self.model.kv_heads)
        own_bytes = self.model.kv_bytes_per_token / shares
        return own_bytes if self.draft is None else own_bytes + self.draft.kv_bytes_per_token

    def host_tier(self) -> HostTierFigures | None:
        """Return the host tier of each lane, whose copies take what the data sheet says of the host's link.

        Raises:
            ConfigInvalid: it holds no block.
        """
        if self.host_bytes == 0:
            return None
        block_bytes = self._block_bytes
        blocks = int(self.host_bytes / block_bytes)
        if blocks == 0:
            raise ConfigInvalid(
                f"kvCache.tiers.host.size is {self.host_bytes} bytes, and a block takes {block_bytes:.0f} on each rank; raise "
                "it to at least that"
            )
        seconds = block_bytes / self.hardware.host_link_bytes_per_second
        return HostTierFigures(blocks, int(block_bytes), seconds, seconds)

    @property
    def _block_bytes(self) -> float:
        return self._rank_token_bytes * self.block_size_tokens

    @property
    def _sent_block_bytes(self) -> float:
        """Bytes of a block in files, in the store and in reads of other replicas: they have no KV of a draft model."""
        draft_bytes = self.draft.kv_bytes_per_token if isinstance(self.draft, ModelShape) else 0.0
        return self._block_bytes - draft_bytes * self.block_size_tokens

    def disk_tier(self) -> DiskTierFigures | None:
        """Return the disk tier of each lane.

        Raises:
            ConfigInvalid: it holds no block, or there is no host tier before it.
        """
        if self.disk_bytes == 0:
            return None
        if self.host_bytes == 0:
            raise ConfigInvalid(
                f"kvCache.tiers.disk.size is {self.disk_bytes} bytes, and there is no host tier, through which all KV of a disk "
                "tier passes; set kvCache.tiers.host.size, too"
            )
        block_bytes = self._sent_block_bytes
        blocks = int(self.disk_bytes / block_bytes)
        if blocks == 0:
            raise ConfigInvalid(
                f"kvCache.tiers.disk.size is {self.disk_bytes} bytes, and a block takes {block_bytes:.0f} on each rank; "
                "raise it to at least that"
            )
        return DiskTierFigures(blocks, DISK_ACCESS_SECONDS, block_bytes / self.disk_bytes_per_second)

    def config(self) -> ReplicaConfig:
        host_tier, disk_tier = self.host_tier(), self.disk_tier()
        return ReplicaConfig(
            topology=self.topology,
            scheduling=self.scheduling,
            service_classes={entry.name: entry for entry in self.service_classes},
            default_class=self.service_classes[0].name,
            max_model_len=self.max_model_len,
            block_size_tokens=self.block_size_tokens,
            kv_blocks=self.kv_tokens() // self.block_size_tokens,
            long_threshold_tokens=self.scheduling.long_threshold_tokens or self.model.long_threshold_tokens,
            tokens_per_lane=self.tokens_per_lane,
            prefix_caching=self.prefix_caching,
            draft_costs=None if self.draft is None else DraftTimes(self.draft, self.hardware).costs(),
            host_tier=host_tier,
            disk_tier=disk_tier,
            peer_block_seconds=self._block_seconds(self.peer_bytes_per_second),
            store_block_seconds=self._block_seconds(self.store_bytes_per_second),
            object_blocks=1 if host_tier is None else object_blocks(int(self._sent_block_bytes)),
        )

    def _block_seconds(self, bytes_per_second: float) -> float | None:
        """Return the time in which a block passes at such a rate; None if nothing passes."""
        return None if bytes_per_second == 0 else self._sent_block_bytes / bytes_per_second

    def predictor(self) -> Predictor:
        """Return a fresh predictor whose lone prefills are chunked as Medha's controller chunks them."""
        scheduling = self.scheduling
        chunking = Chunking(
            max_tokens=scheduling.max_chunk_tokens,
            min_tokens=min(scheduling.min_chunk_tokens, scheduling.max_chunk_tokens),
            budget_seconds=scheduling.max_step_seconds / self.topology.stream,
        )
        return Predictor(self.profile(), self.topology, chunking, self.tokens_per_lane)

    def targets(self) -> Targets:
        """Return the deadlines of the service classes. They need only the profile: all systems share them."""
        table = self.predictor()

        def prefill_seconds(prompts: Counts) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
            return table.prefill_seconds_many(np.zeros_like(prompts), prompts)

        of_class = {
            entry.name: Targets(
                prefill_seconds,
                ttft_floor_seconds=entry.ttft_floor_seconds,
                ttft_factor=entry.ttft_factor,
                tpot_seconds=entry.tpot_target_seconds,
            )
            for entry in self.service_classes
        }
        return replace(of_class[self.service_classes[0].name], of_class=of_class)

    def with_policy(self, policy: str) -> Deployment:
        scheduling = self.scheduling.model_dump() | {"policy": policy}
        return replace(self, scheduling=SchedulingSpec.model_validate(scheduling))

    def simulation(
        self, workload: Workload, *, seed: int = 0, disturbance: Disturbance | None = None
    ) -> Simulation:
        """Return a simulation of Medha on this deployment; `seed` is for the noise, and for which guesses are right."""
        make = self.maker(workload, seed=seed, disturbance=disturbance)
        return Simulation(
            [make(index) for index in range(self.replicas)],
            workload,
            router=RouterCore() if self.replicas > 1 else None,
            latencies=self.latencies,
        )

    def maker(
        self, workload: Workload, *, seed: int = 0, disturbance: Disturbance | None = None
    ) -> Callable[[int], SimulatedReplica]:
        """Return a function that makes the replica of a number."""
        config, profile, ends_at = self.config(), self.profile(), workload.ends_at()

        def make(index: int) -> SimulatedReplica:
            child = np.random.SeedSequence((seed, 0x6E6F6973), spawn_key=(index,))
            return medha_replica(
                f"replica-{index}",
                config,
                profile,
                ends_at,
                cost=disturbed(
                    PredictorCost(self.predictor(), config.host_tier),
                    disturbance,
                    np.random.default_rng(child),
                ),
                message_seconds=self.message_seconds,
                role=self.roles[index % len(self.roles)] if self.roles else "both",
                drain_seconds=self.drain_seconds,
                guesser=self._guesser(Texts(self.acceptance, seed, ends_at)),
            )

        return make

    def _guesser(self, texts: Texts) -> Guesser | None:
        """Return what guesses tokens in one replica; None if nothing does."""
        if not self.guesses:
            return None
        if self.draft is not None:
            return ProposingGuesser(texts, DraftTimes(self.draft, self.hardware))
        # One more, because a step in flight may be sampling the first token of a draft.
        return LookupGuesser(texts, 1 + self.scheduling.speculation.max_draft_tokens)

    def autoscaled(
        self,
        workload: Workload,
        signal: Signal,
        terms: AutoscalerTerms,
        *,
        start_seconds: float,
        demand: DemandTerms | None = None,
    ) -> tuple[Simulation, AutoscaledFleet]:
        """Return a simulation whose number of replicas follows a signal, and the fleet that follows it."""
        make = self.maker(workload)
        demand = demand or DemandTerms(start_seconds=start_seconds)
        simulation = Simulation(
            [make(index) for index in range(max(1, terms.min_replicas))],
            workload,
            router=RouterCore(demand=demand),
            latencies=self.latencies,
        )
        return simulation, AutoscaledFleet(simulation, make, signal, terms, start_seconds=start_seconds)


def deployment_of(
    spec: MedhaReplicaSpec,
    hardware: Hardware,
    model: ModelShape,
    replicas: int = 1,
    *,
    disk_bytes_per_second: float = DISK_BYTES_PER_SECOND,
    draft_model: ModelShape | None = None,
    eagle3: Path | None = None,
    acceptance: float = ACCEPTANCE,
) -> Deployment:
    """Return the deployment that a manifest describes; hardware and shapes of models are not part of a manifest.

    If the manifest names a measured profile, step costs come from there, and the hardware only determines the
    memory. Ranks measure their disk, so no manifest states its rate: it is `disk_bytes_per_second`. Nor does one state the
    `acceptance`: the chance that a guess is right.

    Args:
        spec: the manifest's.
        hardware: of each rank.
        model: the served one.
        replicas: their number.
        disk_bytes_per_second: that a rank reads from its disk tier, or writes.
        draft_model: the manifest's draft model, if it has one.
        eagle3: `config.json` of the manifest's EAGLE-3 head, or its folder, if it has one.
        acceptance: 0 to 1.

    Raises:
        ConfigInvalid: the profile or the head cannot be read, or the shape of the draft model or head is missing.
    """
    size, profile, peers = spec.kv_cache.size, spec.scheduling.profile, spec.kv_cache.peers
    store = spec.kv_cache.store
    if spec.kv_cache.dtype != "auto":
        model = replace(model, kv_dtype_bytes=kv_element_bytes(spec.kv_cache.dtype, model.dtype_bytes))
    draft: DraftShape | None = draft_model
    head = spec.scheduling.speculation.prediction_head
    if head is not None and head.kind == "mtp":
        draft = mtp_shape(model, "scheduling.speculation.predictionHead.kind mtp")
    elif eagle3 is not None:
        draft = read_eagle3_shape(eagle3, model)
    return Deployment(
        model=model,
        hardware=hardware,
        topology=Topology(spec.parallelism.tensor, spec.parallelism.stream, spec.parallelism.kv),
        scheduling=spec.scheduling,
        service_classes=spec.service_classes,
        max_model_len=spec.model.max_model_len or MAX_MODEL_LEN_TOKENS,
        memory_fraction=spec.kv_cache.memory_fraction,
        kv_bytes=None if size is None else quantity_bytes(size),
        measured=None if profile is None else _read_profile(Path(profile)),
        block_size_tokens=spec.kv_cache.block_size_tokens,
        tokens_per_lane=spec.kv_cache.tokens_per_lane,
        prefix_caching=spec.kv_cache.prefix_caching,
        host_bytes=spec.kv_cache.host_bytes,
        disk_bytes=spec.kv_cache.disk_bytes,
        disk_bytes_per_second=disk_bytes_per_second,
        store_bytes_per_second=0.0 if store is None else quantity_bytes(store.bandwidth),
        peer_bytes_per_second=0.0 if peers is None else quantity_bytes(peers.bandwidth),
        roles=(spec.role,),
        replicas=replicas,
        drain_seconds=spec.lifecycle.drain_seconds,
        draft=draft,
        acceptance=acceptance,
    )


def _read_profile(path: Path) -> Profile:
    try:
        return Profile.from_json(path.read_bytes(), str(path))
    except OSError as error:
        raise ConfigInvalid(f"scheduling.profile: {path} cannot be read: {error.strerror}") from error


def named_hardware(name: str) -> Hardware:
    """Return the hardware description of that name.

    Raises:
        ConfigInvalid: there is no such description.
    """
    if name not in HARDWARE:
        raise ConfigInvalid(f"--hardware is {name!r}; choose one of {', '.join(HARDWARE)}")
    return HARDWARE[name]


def named_model(name: str) -> ModelShape:
    """Return the model shape of that name.

    Raises:
        ConfigInvalid: there is no such shape.
    """
    if name not in MODELS:
        raise ConfigInvalid(f"--model is {name!r}; choose one of {', '.join(MODELS)}")
    return MODELS[name]


def disturbed(cost: StepCost, disturbance: Disturbance | None, generator: np.random.Generator) -> StepCost:
    if disturbance is None or disturbance == Disturbance():
        return cost
    return Perturbed(cost, bias=disturbance.bias, noise=disturbance.noise, generator=generator)


def card(name: str, config: ReplicaConfig, prefill_points: tuple[tuple[int, float], ...] = ()) -> Announce:
    """Return the announcement of an idle replica of `config`; the driver updates the load in it."""
    kv_tokens = config.pool_tokens
    return Announce(
        replica=name,
        model=MODEL_NAME,
        digest=DIGEST,
        epoch=0,
        ready=True,
        draining=False,
        max_model_len=config.max_model_len,
        vocab_size=1,
        kv_tokens_total=kv_tokens,
        kv_tokens_free=kv_tokens,
        running=0,
        waiting=0,
        pending_prefill_seconds=0.0,
        longest_request_tokens=min(config.max_model_len, kv_tokens),
        waiting_limit=config.scheduling.max_waiting,
        prefill_points=prefill_points,
    )


def medha_replica(
    name: str,
    config: ReplicaConfig,
    profile: Profile | StepProfile,
    ends_at: Mapping[str, int],
    *,
    cost: StepCost | None = None,
    message_seconds: float = 0.0,
    role: ReplicaRole = "both",
    drain_seconds: float | None = None,
    guesser: Guesser | None = None,
) -> SimulatedReplica:
    """Return a replica with Medha's controller. `cost` is the ground truth, by default the profile.

    `drain_seconds` is the time that its requests have once it drains; None: as long as they take. Without a `guesser`, no
    tokens are guessed.
    """
    controller = ReplicaController(config, profile)
    executor = Executor(
        cost
        or PredictorCost(
            Predictor(profile, config.topology, tokens_per_lane=config.tokens_per_lane), config.host_tier
        ),
        stages=config.topology.stream,
        lanes=config.topology.kv,
        ends_at=ends_at,
        message_seconds=message_seconds,
        guesser=guesser,
    )
    points = [tokens for tokens in _POINTS if tokens <= config.max_model_len]
    times = [controller.predictor.prefill_seconds(0, tokens) for tokens in points]
    read_seconds, read_seconds_per_token = controller.read_line
    announced = replace(
        card(name, config, tuple(zip(points, times, strict=True))),
        tokens_per_lane=config.tokens_per_lane if config.topology.kv > 1 else 0,
        order=controller.policy_terms,
        hands_kv_over=config.peer_block_seconds is not None,
        read_seconds=read_seconds,
        read_seconds_per_token=read_seconds_per_token,
        role=role,
    )
    block_size_tokens = config.block_size_tokens if config.prefix_caching else 0
    return SimulatedReplica(
        controller,
        executor,
        announced,
        block_size_tokens,
        controller.work_ahead,
        hashes_outputs=config.host_tier is not None and config.prefix_caching,
        drain_seconds=drain_seconds,
    )

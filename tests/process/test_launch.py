"""A part reads the same settings that the launcher has written for it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from medha.api.replica import MedhaReplicaSpec
from medha.errors import ConfigInvalid
from medha_process.launch import RANK_ENVIRONMENT, controller_part, rank_part, router_part
from medha_process.part_settings import ControllerSettings, RankSettings, RouterEndpoints
from medha_process.router_settings import RouterSettings

SPEC = MedhaReplicaSpec.model_validate(
    {"model": {"name": "m", "source": {"path": "/models/m"}, "maxModelLen": 4096}, "parallelism": {"kv": 2}}
)
RANK = RankSettings(
    rank=1, spec=SPEC, model_directory=Path("/m"), control="ipc://c", tokens="ipc://t", key_file=Path("k"),
    controller_key_file=Path("c"),
)  # fmt: skip
CONTROLLER = ControllerSettings(
    replica="r", spec=SPEC, model_directory=Path("/m"),
    routers=(RouterEndpoints(control="ipc://c", tokens="ipc://t"),),
    router_key_file=Path("r"), enrolment_file=Path("e"), rank_control="ipc://rc", rank_tokens="ipc://rt",
    key_file=Path("k"), rank_keys_file=Path("rk"), log_level="debug",
)  # fmt: skip
ROUTER = RouterSettings(key_file=Path("k"), enrolment_file=Path("e"), allowed_hosts=("chat.example",))


def test_each_part_reads_what_was_written_for_it(tmp_path: Path) -> None:
    launched = (
        (router_part(ROUTER, tmp_path), "medha_router", ROUTER),
        (controller_part(CONTROLLER, tmp_path), "medha_worker.controller", CONTROLLER),
        (rank_part(RANK, tmp_path), "medha_worker.rank", RANK),
    )
    assert [part.name for part, _, _ in launched] == ["router", "controller", "rank 1"]
    for part, module, settings in launched:
        assert part.argv[:-1] == (sys.executable, "-m", module, "--settings")
        assert type(settings).read(Path(part.argv[-1])) == settings
    assert [part.environment for part, _, _ in launched] == [{}, {}, RANK_ENVIRONMENT]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "controller.json",
        "rank-1.json",
        "router.json",
    ]


def test_a_rank_counts_the_ranks_on_its_host() -> None:
    assert (RANK.topology.ranks, RANK.neighbours) == (2, 2)
    assert RANK.model_copy(update={"ranks_on_host": 1}).neighbours == 1


def test_a_rank_knows_its_place_on_its_host() -> None:
    assert RANK.place_on_host == 1
    ranks = [RANK.model_copy(update={"rank": rank, "ranks_on_host": 4}) for rank in range(8)]
    assert [one.place_on_host for one in ranks] == [0, 1, 2, 3, 0, 1, 2, 3]


@pytest.mark.parametrize(
    ("text", "named"),
    [('{"rank": "one"}', "rank"), ('{"rnak": 1}', "rnak"), ("no JSON", "JSON"), (None, "No such file")],
)
def test_wrong_settings_are_refused_with_the_name_of_the_file(
    tmp_path: Path, text: str | None, named: str
) -> None:
    path = tmp_path / "rank-0.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigInvalid, match=named) as refused:
        RankSettings.read(path)
    assert str(path) in str(refused.value)

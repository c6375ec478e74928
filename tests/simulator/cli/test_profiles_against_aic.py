"""Tests of `warmroute-sim profiles --against-aic` with the real tables of the package
`aiconfigurator-core`.
"""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from engine.profiles import PROFILES, Profile, profile
from simulator.step_times.compare import read_rows
from simulator.step_times.tables import Instance, TableError, Tables
from tests.simulator.cli_support import Run, run
from tests.simulator.step_times.configs import CONFIGS
from tests.simulator.step_times.tables_at_hand import rows_by_profile

__all__ = ["run"]
KNOWN = CONFIGS["qwen3-32b"] | {  # with the other fields that the tables need
    "architectures": ["Qwen3ForCausalLM"],
    "max_position_embeddings": 40_960,
    "torch_dtype": "bfloat16",
}
DENSE, EXPERTS = "qwen3-32b-h100-tp2", "gpt-oss-120b-h100-tp2"


def test_the_stored_rows_equal_those_of_the_aic_tables(run: Run, tmp_path: Path) -> None:
    found, rows = tmp_path / "found.json", tmp_path / "rows.csv"
    said = run("profiles", DENSE, EXPERTS, "--against-aic", "--json", found, "--rows", rows)
    assert said.status == 0, said.out + said.err
    assert "vllm 0.24.0" in said.out
    assert [one["source"] for one in json.loads(found.read_bytes())] == [
        "AIConfigurator 0.12.0, vllm 0.24.0 on h100_sxm"
    ] * 2
    for name, again in read_rows(rows).items():
        kept = rows_by_profile()[name]
        assert [row[:4] for row in again] == [row[:4] for row in kept]
        assert [row.seconds for row in again] == pytest.approx([r.seconds for r in kept], rel=1e-4)


def test_a_refit_reproduces_the_built_in_profiles(run: Run, tmp_path: Path) -> None:
    made = tmp_path / "profiles.json"
    said = run("profiles", DENSE, EXPERTS, "--against-aic", "--refit", made)
    assert said.status == 0, said.out + said.err
    for one in msgspec.json.decode(made.read_bytes(), type=list[Profile]):
        shipped = PROFILES[one.name]
        assert one.kv_capacity_tokens == shipped.kv_capacity_tokens
        assert one.provenance == shipped.provenance
        for constant in ("linear_s", "pair_s", "weights_s", "context_s", "experts_s"):
            assert getattr(one.step_time, constant) == pytest.approx(
                getattr(profile(one.name).step_time, constant), rel=0.01
            )


@pytest.mark.parametrize(
    "instance",
    [
        Instance("no/such-model", "h100_sxm"),
        Instance("Qwen/Qwen3-32B", "h99"),
        Instance("Qwen/Qwen3-32B", "h100_sxm", "no-engine"),
        Instance("Qwen/Qwen3-32B", "h100_sxm", settings={"gemm_quant_mode": "int8_wo"}),
    ],
)
def test_a_deployment_missing_in_the_tables_gives_a_one_line_error(instance: Instance) -> None:
    with pytest.raises(TableError) as raised:
        list(Tables(instance).rows())
    assert instance.model in str(raised.value)
    assert "\n" not in str(raised.value)


def test_the_error_for_a_profile_without_a_table_lists_those_with_one(run: Run) -> None:
    said = run("profiles", "deepseek-r1-gb200-ep8", "--against-aic")
    assert said.status == 2
    assert "no table is known for deepseek-r1-gb200-ep8; with one: " in said.err


def test_a_config_is_fitted_to_the_tables_of_its_model(run: Run, tmp_path: Path) -> None:
    config, made = tmp_path / "any.json", tmp_path / "mine-tp2.json"
    config.write_text(json.dumps(KNOWN))
    said = run("profile", config, "--gpu", "h100", "--tp", 2, "--tables", "vllm", "--out", made)
    assert said.status == 0, said.out + said.err
    assert "against AIConfigurator 0.12.0, vllm 0.24.0 on h100_sxm: prefill " in said.out
    found, built_in = profile(str(made)), profile(DENSE)
    assert found.step_time.pair_s == pytest.approx(built_in.step_time.pair_s, rel=0.01)
    assert found.kv_capacity_tokens == pytest.approx(built_in.kv_capacity_tokens, rel=0.01)


def test_a_config_without_a_table_is_reported(run: Run, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(KNOWN | {"architectures": ["NewForCausalLM"]}))
    said = run("profile", config, "--gpu", "h100", "--tp", 2, "--tables", "vllm")
    assert said.status == 2
    assert said.err.startswith("warmroute-sim: config.json on 2 x h100_sxm, vllm: ")

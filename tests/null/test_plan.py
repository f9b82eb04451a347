# Owns: the cost model of `ratoon plan` by hand-computed cases, its direction of change, and its documented errors.
# Promises: a constant, term or documented figure that changes alone fails here.
# Never: needs torch or a model.
from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ratoon.core.config import ModelConfig
from ratoon.core.drafter import DrafterConfig
from ratoon.lab.gpus import GPUS, H200, LINKS, Gpu, gpu_of, link_of
from ratoon.lab.plan import Engine, Pair, Round, Shape, best, distinct_experts, expected_tau, plain, predict, work
from ratoon.lab.planned import Question
from ratoon.lab.predicted import MEASURED, OTHERS, QWEN3_8B, fit, pair_of, report, unseen, worst
from tests.cpu.fake_engine import ratoon

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "benchmarks" / "configs"
# 1 byte/ns, so that milliseconds can be read off byte counts; 10 more rows cost 1 ms per GB.
SIMPLE = Gpu("simple", 1e-3, 1.0, 1000, (1, 11, 21), (2.0, 3.0, 4.0), 1.0, "made up")
IDEAL = Engine(bandwidth_share=1.0, launch_factor=1.0, place_us=1.0)
SMALL = Shape(2, 8, 16, 4, 2, 4, 100, qk_norm=False)


def read(name: str) -> dict[str, Any]:
    return json.loads((CONFIGS / name).read_text())


def test_shapes_are_those_of_the_configs() -> None:
    shape = Shape.of(ModelConfig.from_hf(read("qwen3-8b.json")))
    assert shape == QWEN3_8B
    # The published figures of the shape: 15.1 GB in products, 147,456 bytes of K/V a token.
    total = shape.attention_weights + shape.mlp_weights + shape.head_weights
    assert 2 * total == pytest.approx(15.1e9, rel=0.005) and shape.kv_bytes == 147_456
    for model, name in (("Qwen3-8B", "qwen3-8b"), ("SmolLM2", "smollm2-135m")):
        drafter = DrafterConfig.from_hf(read(f"{name}-dflash-b16.json"))
        pair = pair_of(model)
        assert pair.drafter == Shape.of(drafter) and pair.target == Shape.of(ModelConfig.from_hf(read(f"{name}.json")))
        assert (pair.block, pair.taps) == (drafter.block_size, len(drafter.target_layer_ids))


def test_a_plain_round_by_hand() -> None:
    done = work(Pair(SMALL, SIMPLE), Round(rows=1, nodes=0, block=0, context=10))
    attention = 2 * 8 * (32 + 16)  # qkv 8 x 32, o 16 x 8
    weights = attention + 2 * 3 * 8 * 16 + 8 * 100
    kv, beside, logits = 10 * 2 * 2 * 2 * 4 * 2, 2 * (4 * 8 + 2 * 32 + 2 * 16 + 3 * 16) * 2, 100 * 8
    assert done.read_ms == pytest.approx((2 * weights + kv + beside + logits) / 1e6)
    assert done.launches == 8 * 2 + 16 and done.rows_ms == done.place_layers == done.link_ms == 0
    assert done.ms(IDEAL, SIMPLE) == pytest.approx(done.read_ms + 0.032)
    assert done.ms(Engine(0.5, 2.0, 1.0), SIMPLE) == pytest.approx(2 * done.read_ms + 0.064)


def test_a_drafted_round_by_hand() -> None:
    pair = Pair(SMALL, SIMPLE, replace(SMALL, num_layers=1, qk_norm=True), block=4, taps=3)
    done, bare = work(pair, Round(1, 3, 4, 10)), work(pair, Round(1, 0, 0, 10))
    assert done.launches == bare.launches + 9 + 30
    assert done.place_layers == 3 * 2 + 3 * 1
    draft_layer, head, context = 8 * 48 + 3 * 8 * 16, 800, 8 * (3 * 8 + 2 * 2 * 4)
    weights = 2 * 8 * 48 + 2 * 3 * 8 * 16 + head + draft_layer + head + context
    # 4 rows are 3 more than one: 0.3 ms per GB.
    assert done.rows_ms == pytest.approx(0.3 * 2 * weights / 1e9)
    logits = (4 + 4) * 100 * 8
    kv = 10 * (SMALL.kv_bytes + SMALL.kv_bytes // 2)
    beside = 4 * (SMALL.place_bytes + SMALL.place_bytes // 2)
    assert done.read_ms == pytest.approx((2 * weights + kv + beside + logits) / 1e6)


def test_beyond_the_rows_measured_products_grow_with_rows() -> None:
    pair = Pair(SMALL, SIMPLE)
    at = {rows: work(pair, Round(rows, 0, 0, 1)) for rows in (21, 42)}
    assert at[42].rows_ms == pytest.approx(2 * at[21].rows_ms)
    weights = 2 * (SMALL.attention_weights + SMALL.mlp_weights + SMALL.head_weights) / 1e6
    rest = {rows: part.read_ms - weights * max(1, rows / 21) for rows, part in at.items()}
    assert rest[42] == pytest.approx(2 * rest[21])


def test_attention_waits_in_waves_when_heads_outnumber_multiprocessors() -> None:
    crowded = Pair(SMALL, replace(SIMPLE, multiprocessors=4), replace(SMALL, num_layers=1), block=4, taps=1)
    assert work(crowded, Round(2, 3, 4, 10)).place_layers == 9
    assert work(crowded, Round(8, 3, 4, 10)).place_layers == 4 * 9, "8 rows of 2 K/V heads on 4"


@pytest.mark.parametrize(
    ("experts", "chosen", "places", "distinct"), [(128, 8, 1, 8.0), (4, 1, 2, 1.75), (8, 8, 5, 8.0), (64, 6, 10**6, 64)]
)
def test_distinct_experts(experts: int, chosen: int, places: int, distinct: float) -> None:
    assert distinct_experts(experts, chosen, places) == pytest.approx(distinct)


def test_a_mixture_reads_the_experts_that_are_awake() -> None:
    mixed = replace(SMALL, num_experts=4, experts_per_token=1)
    dense = Pair(SMALL, SIMPLE)
    one, two = (work(Pair(mixed, SIMPLE), Round(rows, 0, 0, 1)).read_ms for rows in (1, 2))
    assert one == pytest.approx(work(dense, Round(1, 0, 0, 1)).read_ms)
    more = work(dense, Round(2, 0, 0, 1)).read_ms + 0.75 * 2 * SMALL.mlp_weights / 1e6
    assert two == pytest.approx(more)


def test_gpus_share_bytes_and_pay_for_collectives() -> None:
    link = LINKS["pcie"]
    alone, four = Pair(QWEN3_8B, H200), Pair(QWEN3_8B, H200, num_gpus=4, link=link)
    one, split = (work(pair, Round(8, 0, 0, 1024)) for pair in (alone, four))
    assert split.read_ms == pytest.approx(one.read_ms / 4) and split.launches == one.launches
    size = 8 * 4096 * 2
    assert split.link_ms == pytest.approx(72 * (link.start_us / 1e3 + 1.5 * size / (link.gb_s * 1e6)))
    assert one.link_ms == 0


def test_expected_tau_is_that_of_the_published_table() -> None:
    got = [expected_tau("chain", 15, 16), *(expected_tau("tree", nodes, 16) for nodes in (15, 31, 63))]
    assert [*got, expected_tau("tree", 63, 8)] == pytest.approx([4.727, 4.836, 5.303, 5.764, 5.375], abs=5e-4)
    assert expected_tau("ar", 0, 0) == 1


def test_rounds_take_longer_with_rows_nodes_and_context() -> None:
    pair, engine = pair_of("Qwen3-8B"), fit()

    def ms(rows: int, nodes: int, context: int) -> float:
        return work(pair, Round(rows, nodes, 16 if nodes else 0, context)).ms(engine, H200)

    assert ms(1, 0, 1024) < ms(1, 15, 1024) < ms(1, 31, 1024) < ms(1, 63, 1024)
    assert ms(8, 15, 1024) < ms(32, 15, 1024) < ms(128, 15, 1024) < ms(128, 15, 4096)
    assert plain(pair, engine, 128, 1024).tokens_per_s > plain(pair, engine, 8, 1024).tokens_per_s


def test_the_best_budget_shrinks_with_concurrency() -> None:
    pair = pair_of("Qwen3-8B")
    choices = [best(pair, fit(), rows, 416, ("chain", "tree")) for rows in (1, 8, 32, 128, 4096)]
    sizes = [choice.round_.nodes for choice in choices]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > sizes[2] > sizes[3]
    assert choices[-1].method == "ar", "where products are bound by arithmetic, drafting cannot win"


def test_a_chain_is_no_longer_than_its_block() -> None:
    pair = pair_of("Qwen3-8B")
    long, whole = (predict(pair, fit(), "chain", Round(1, nodes, 16, 1024)) for nodes in (63, 15))
    assert long == whole


# ---- against measurements ---------------------------------------------------------------------------------


def test_constants_are_fitted_to_rounds_of_one_row_alone() -> None:
    fitted = [row for row in MEASURED if row.fitted]
    assert {row.rows for row in fitted} == {1} and {row.nodes for row in fitted} == {0, 15}
    engine = fit()
    assert 0.85 < engine.bandwidth_share < 1 and 1 < engine.launch_factor < 4 and 0.1 < engine.place_us < 1


def test_unseen_rounds_are_predicted_within_15_percent() -> None:
    rows = unseen()
    assert {row.rows for row in rows} == {1, 8, 32, 128} and {31, 63} <= {row.nodes for row in rows}
    assert worst(rows) < 0.15


def test_measured_rows_are_those_of_numbers() -> None:
    text = (ROOT / "docs" / "NUMBERS.md").read_text(encoding="utf-8")
    for row in MEASURED:
        if row.rows == 1 and row.context == 1024:
            assert f"{row.ms:g}" in text
        else:
            tau = 6.5 if row.nodes else 1.0
            assert f"{round(1e3 * row.rows * tau / row.ms):,}" in text, row


def test_numbers_holds_the_report_as_the_code_gives_it() -> None:
    text = (ROOT / "docs" / "NUMBERS.md").read_text(encoding="utf-8")
    missing = [line for line in report() if line not in text]
    assert not missing, f"docs/NUMBERS.md lacks what `ratoon plan --compare` says: {missing[:3]}"


def test_others_are_shown_with_their_errors() -> None:
    assert max(abs(other.error) for other in OTHERS) > 0.5, "large ones too"
    assert {other.gpu for other in OTHERS} == set(GPUS)


# ---- the command ------------------------------------------------------------------------------------------


def ask(**changes: Any) -> Question:
    given: dict[str, Any] = {
        "model": str(CONFIGS / "qwen3-8b.json"),
        "drafter": str(CONFIGS / "qwen3-8b-dflash-b16.json"),
        "gpus": 1,
        "gpu": "h200",
        "link": "nvlink",
        "methods": "ar,chain,tree",
        "budgets": "15,63,auto",
        "concurrency": "1,128",
        "context": "1024",
        "tau": None,
    }
    return Question.parse(**given | changes)


def test_the_question_gives_each_choice_once() -> None:
    names = [(choice.method, choice.round_.nodes) for choice in ask().rounds(1, 1024)]
    assert names[0] == ("ar", 0) and len(names) == len(set(names))
    assert {("chain", 15), ("tree", 15), ("tree", 63)} < set(names)


def test_a_known_mean_takes_the_place_of_the_table() -> None:
    question = ask(methods="chain", budgets="15", tau=6.5)
    _, chain = question.rounds(1, 1024)
    assert chain.tau == 6.5 and chain.tokens_per_s == pytest.approx(6500 / chain.ms)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gpu": "a100"}, r"'a100' is not known.*h200, b200"),
        ({"link": "string"}, r"'string' is not known.*nvlink, pcie"),
        ({"gpus": 3}, "cannot share 32 heads"),
        ({"gpus": 0}, "cannot share"),
        ({"drafter": "none"}, "need a --drafter"),
        ({"drafter": "auto"}, "need a --drafter"),
        ({"tau": 6.5}, "use --methods ar,chain"),
        ({"methods": "chain", "budgets": "15", "tau": 0.5}, "at least 1"),
        ({"budgets": "500"}, "--budgets"),
        ({"concurrency": "none"}, "--concurrency takes numbers"),
        ({"context": "0"}, "--context takes numbers"),
        ({"drafter": str(CONFIGS / "smollm2-135m-dflash-b16.json")}, "made for a target of 30 layers"),
    ],
)
def test_what_cannot_be_planned_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ask(**changes)


def test_a_mixture_of_experts_is_refused_by_name(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(read("qwen3-8b.json") | {"architectures": ["Qwen3MoeForCausalLM"]}))
    with pytest.raises(ValueError, match="Qwen3MoeForCausalLM"):
        ask(model=str(config))
    config.write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        ask(model=str(config))


def test_names_are_looked_up() -> None:
    assert gpu_of("h200") is H200 and link_of("pcie").start_us > link_of("nvlink").start_us
    assert "not measured" in GPUS["b200"].source and GPUS["b200"].products_ms[0] < H200.products_ms[0]


def test_the_command_answers_and_compares() -> None:
    pair = ["--model", str(CONFIGS / "qwen3-8b.json"), "--drafter", str(CONFIGS / "qwen3-8b-dflash-b16.json")]
    result = ratoon("plan", *pair, "--concurrency", "1,128", "--gpus", "2")
    assert result.exit_code == 0 and result.output.count("best") == 2
    assert "published table" in result.output and "not measured" in result.output
    assert ratoon("plan", "--compare").output.splitlines() == report()
    refused = ratoon("plan", *pair, "--gpu", "a100")
    assert refused.exit_code == 2 and "h200" in refused.output

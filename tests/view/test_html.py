"""The HTML page of a plan in a real browser: what it shows, what a click, a key or a filter does, what never runs."""

import json
import random
from pathlib import Path

import pytest

import roost
from roost.placement.memory.traffic import micro_batch_traffic
from roost.view.html import plan_to_html
from tests.browser import needs_chromium, opened_browser

ROOT = Path(__file__).parents[2]
pytestmark = needs_chromium

QWEN_7B = {
    "model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064,
}  # fmt: skip
QWEN_MIXTURE = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "head_dim": 128,
    "num_key_value_heads": 4, "intermediate_size": 6144, "vocab_size": 151936, "num_experts": 128,
    "num_experts_per_tok": 8, "moe_intermediate_size": 768,
}  # fmt: skip


@pytest.fixture(scope="module")
def browser():
    with opened_browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The file of a plan's page; plans that tests share are written once."""
    folder, files = tmp_path_factory.mktemp("plans"), {}

    def file_of(plan):
        if id(plan) not in files:
            file = folder / f"plan-{len(files)}.html"
            file.write_text(plan if isinstance(plan, str) else plan_to_html(plan), encoding="utf-8")
            files[id(plan)] = file, plan  # held, so that no other plan gets its id
        return files[id(plan)][0]

    return file_of


@pytest.fixture
def show(browser, written):
    """Opens a plan's page; anything that it asks for, or any error in it, fails the test."""
    browser.troubles = []

    def opened(plan, **options):
        page = browser.open(written(plan), **options)
        page.wait_for_selector("#grid .rows .row")
        return page

    yield opened
    assert browser.troubles == []


@pytest.fixture(scope="module")
def heterogeneous():
    folder = ROOT / "examples" / "heterogeneous"
    return roost.plan(folder / "cluster.yaml", folder / "machines.yaml")


@pytest.fixture(scope="module")
def roll():
    return roost.plan(ROOT / "examples" / "placements" / "roll.yaml")


def cell(page, row, column):
    return page.locator(f'[data-row="{row}"] [data-column="{column}"]')


def labels(page):
    return page.locator(".rows .row .label b").all_inner_texts()


def facts(card):
    """The pairs of a card in the details: names to values, and the variables of its environment."""
    plain = card.locator("dl:not(.code)")
    names, values = plain.locator("dt").all_inner_texts(), plain.locator("dd").all_inner_texts()
    variables = {}
    for listed in card.locator("dl.code").all():
        variables |= dict(
            zip(listed.locator("dt").all_inner_texts(), listed.locator("dd").all_inner_texts(), strict=True)
        )
    return dict(zip(names, values, strict=True)), variables


# Clicks each cell and reads its cards, as `facts` does, in one call: the browser is asked thousands of times otherwise.
CARDS_OF_ALL_CELLS = """() => {
    const texts = (card, names) => [...card.querySelectorAll(names)].map(one => one.innerText);
    const pairs = (card, list) => Object.fromEntries(
        texts(card, `${list} dt`).map((name, index) => [name, texts(card, `${list} dd`)[index]]));
    const cells = () => document.querySelectorAll("[data-column]:not([data-column='0'])");
    const found = [];
    for (let index = 0; index < cells().length; index++) {
        cells()[index].click();
        for (const card of document.querySelectorAll("#details article"))
            found.push([card.querySelector("h3").innerText, pairs(card, "dl:not(.code)"), pairs(card, "dl.code")]);
    }
    return found;
}"""


class TestGrid:
    def test_header_and_legend(self, show, heterogeneous):
        page = show(heterogeneous)
        header = page.inner_text("header")
        assert "cluster.yaml" in header
        for words in ("rlinf notation", "disaggregated", "18 nodes, 128 accelerators, 2 Franka", "530 processes"):
            assert words in header
        legend = [text.split() for text in page.locator("#legend .component").all_inner_texts()]
        assert legend == [["A", "actor", "64"], ["R", "rollout", "64"], ["E", "env", "2"], ["Ag", "agent", "400"]]
        colours = page.locator("#legend .swatch").evaluate_all(
            "all => all.map(one => getComputedStyle(one).backgroundColor)"
        )
        assert len(set(colours)) == 4

    def test_a_cell_for_each_accelerator(self, show, heterogeneous):
        page = show(heterogeneous)
        assert labels(page) == [f"node {node}" for node in range(18)]
        assert page.locator(".cell").count() == 128
        assert cell(page, 9, 3).inner_text().split() == ["R", "10"]
        assert page.locator(".pill").all_inner_texts()[-1].split() == ["Franka", "0", "E", "1"]
        assert cell(page, 3, 9).inner_text().split() == ["CPU", "Ag", "300-399"]

    def test_a_shared_accelerator_is_split(self, show, roll):
        page = show(roll)
        assert [part.split() for part in cell(page, 0, 3).locator(".stripe").all_inner_texts()] == [
            ["A", "2"],
            ["R", "1"],
        ]
        assert cell(page, 0, 3).locator(".joined-after").count() == 1, "an engine of two is one bar across two cells"

    def test_free_accelerators(self, show):
        page = show(roost.plan({"num_gpus_per_node": 8, "actor_train": {"device_mapping": "0-5"}}))
        assert page.locator(".cell.free").count() == 2
        assert "2 accelerators free" in page.inner_text("header")
        cell(page, 0, 8).click()
        assert "No process holds it" in page.inner_text("#details")

    def test_equal_nodes_fold_and_open(self, show, heterogeneous):
        page = show(heterogeneous)
        page.click("#unfold")
        assert labels(page) == ["nodes 0-3", "nodes 4-7", "nodes 8-15", "nodes 16-17"]
        page.click('[data-row="1"] .label')
        assert labels(page)[:6] == ["nodes 0-3", "nodes 4-7", "node 4", "node 5", "node 6", "node 7"]
        page.click('[data-row="1"] .label')
        assert len(labels(page)) == 4


class TestDetails:
    def test_a_process_with_all_it_is_started_with(self, show, heterogeneous):
        page = show(heterogeneous)
        cell(page, 2, 4).click()
        details = page.locator("#details")
        assert details.locator("h2").inner_text() == "node 2, accelerator 3"
        named, variables = facts(details.locator("article"))
        assert named["rank"] == "19 of 64"
        assert (named["runs on"], named["local rank"], named["devices"]) == ("node 2", "3 of 8", "3")
        assert (named["node group"], named["interpreter"]) == ("a800", "/opt/venv/openpi/bin/python3")
        assert variables["GLOO_SOCKET_IFNAME"] == "eth0"
        assert variables["CUDA_VISIBLE_DEVICES"] == "3"

    def test_a_robot_with_its_config(self, show, heterogeneous):
        page = show(heterogeneous)
        cell(page, 17, 1).click()
        _, variables = facts(page.locator("#details article"))
        assert variables["robot_ip"] == "10.10.10.2"
        assert "322142001233" in variables["camera_serials"]

    def test_processes_that_are_alike_are_one_card(self, show, heterogeneous):
        page = show(heterogeneous)
        cell(page, 1, 9).click()
        named, _ = facts(page.locator("#details article"))
        assert named["rank"] == "100-199 of 400"
        assert (named["local rank"], named["devices"]) == ("0-99 of 100", "none")

    def test_any_node_of_a_folded_row_can_be_looked_at(self, show, heterogeneous):
        page = show(heterogeneous)
        page.click("#unfold")
        cell(page, 2, 1).click()
        page.fill("#details input", "13")
        page.press("#details input", "Enter")
        named, _ = facts(page.locator("#details article"))
        assert (named["rank"], named["runs on"]) == ("40 of 64", "node 13")

    def test_an_engine_across_nodes_shows_all_its_devices(self, show):
        page = show(
            roost.plan({"num_gpus_per_node": 2, "actor_infer": {"device_mapping": "0-7", "num_gpus_per_worker": 4}})
        )
        cell(page, 3, 2).click()
        named, _ = facts(page.locator("#details article"))
        assert (named["rank"], named["runs on"]) == ("1 of 2", "node 2")
        assert named["devices"] == "0-1; node 3: 0-1"

    @pytest.mark.parametrize("name", ["roll", "rlinf", "loop"])
    def test_every_cell_says_what_the_plan_says(self, show, name):
        plan = roost.plan(ROOT / "examples" / "placements" / f"{name}.yaml")
        page = show(plan)
        processes = {
            (part.name, process.placement.rank): process for part in plan.components for process in part.processes()
        }
        seen = set()
        for title, named, variables in page.evaluate(CARDS_OF_ALL_CELLS):
            component = title.split()[1]
            first = int(named["rank"].split(" of ")[0].replace("-", ",").split(",")[0])
            process = processes[component, first]
            assert variables == dict(process.env)
            assert named["runs on"] == f"node {process.placement.cluster_node_rank}"
            assert named["local rank"].endswith(f" of {process.placement.local_world_size}")
            assert named["node group"] == process.placement.node_group_label
            seen.add((component, first))
        with_devices = {key for key, process in processes.items() if process.placement.devices}
        assert with_devices <= seen

    def test_by_keyboard(self, show, roll):
        page = show(roll)
        page.focus("#nodes")
        page.keyboard.press("Tab")
        for key in ("ArrowDown", "ArrowRight", "ArrowRight", "ArrowRight", "Enter"):
            page.keyboard.press(key)
        assert page.inner_text("#details h2") == "node 1, accelerator 2"
        assert page.evaluate("document.activeElement.dataset.column") == "3"
        assert "rollout 5" in page.inner_text("#tip"), "what has the focus is told as what is pointed at"
        page.keyboard.press("End")
        page.keyboard.press(" ")
        assert page.inner_text("#details h2") == "node 1, without a device"
        page.keyboard.press("Escape")
        assert page.locator("#details article").count() == 0


class TestFilters:
    def test_components(self, show, heterogeneous):
        page = show(heterogeneous)
        page.click('#legend [data-component="0"]')
        assert page.get_attribute('#legend [data-component="0"]', "aria-pressed") == "false"
        assert labels(page) == [f"node {node}" for node in (*range(4), *range(8, 18))], "agents are still on 0 to 3"
        assert cell(page, 0, 1).get_attribute("class") == "cell free"
        assert not page.is_visible('#phases tr[data-component="0"]')
        page.click("text=show all")
        assert len(labels(page)) == 18
        assert page.is_visible('#phases tr[data-component="0"]')

    @pytest.mark.parametrize(
        ("text", "nodes"),
        [
            ("3", [3]),
            ("8-15", range(8, 16)),
            ("franka", [16, 17]),
            ("4090", range(8, 16)),
            ("0, franka 2-3", [0, 2, 3, 16, 17]),
            ("16-99", [16, 17]),
            ("", range(18)),
        ],
    )
    def test_nodes(self, show, heterogeneous, text, nodes):
        page = show(heterogeneous)
        page.fill("#nodes", text)
        assert labels(page) == [f"node {node}" for node in nodes]

    @pytest.mark.parametrize(("text", "words"), [("99", "the last is 17"), ("h100", "groups: a800, 4090, franka")])
    def test_nodes_that_are_not_there(self, show, heterogeneous, text, words):
        page = show(heterogeneous)
        page.fill("#nodes", text)
        assert labels(page) == []
        assert words in page.inner_text("#shown")


class TestPhases:
    def test_who_runs_when(self, show, roll):
        page = show(roll)
        table = page.locator("#phases article").first
        assert table.locator("h3").inner_text() == "node 0, accelerators 0-7; node 1, accelerators 0-3"
        assert table.locator(".decision").inner_text() == "sleep"
        assert table.locator("thead th").all_inner_texts() == ["generate", "infer", "learn", "sync"]
        states = table.locator("tr[data-component='1'] .state")
        assert states.evaluate_all("all => all.map(one => one.classList[1])") == ["runs", "sleeps", "sleeps", "runs"]
        assert "unknown" in table.locator(".use").inner_text()
        assert "without an accelerator" in page.inner_text("#phases")

    def test_memory(self, show, tmp_path):
        (tmp_path / "config.json").write_text(json.dumps(QWEN_7B))
        plan = roost.plan(
            {
                "cluster": {"num_nodes": 1, "component_placement": {"actor,rollout": "all"}},
                "actor": {"model": {"model_path": str(tmp_path)}},
                "rollout": {"gpu_memory_utilization": 0.5},
                "runner": {"seq_length": 4096},
            },
            {"nodes": [{"accelerators": 8, "memory_gb": 80}]},
        )
        page = show(plan)
        (held,) = plan.residency.classes
        used = [held.used_gib(phase) for phase in held.phases]
        assert page.locator(".use td small").all_inner_texts() == [f"{size:.1f} of 80 GiB" for size in used]
        widths = page.locator(".memory").first.evaluate(
            "bar => [...bar.children].map(part => part.clientWidth / bar.clientWidth)"
        )
        assert sum(widths) == pytest.approx(used[0] / 80, abs=0.02)

    def test_routes(self, show, roll, heterogeneous):
        assert "12 same device by CUDA IPC" in show(roll).inner_text("#routes")
        assert "64 other node by NCCL over the network" in show(heterogeneous).inner_text("#routes")

    def test_traffic_by_dimension(self, show, roll, tmp_path):
        assert not show(roll).locator("#traffic").count(), "its model is not known"
        (tmp_path / "config.json").write_text(json.dumps(QWEN_MIXTURE))
        sizes = {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 4}
        plan = roost.plan(
            {
                "cluster": {"num_nodes": 1, "num_gpus_per_node": 8, "component_placement": {"actor": "all"}},
                "actor": {"training_backend": "fsdp", "model": {"model_path": str(tmp_path), **sizes}},
            }
        )
        page, traffic = show(plan), micro_batch_traffic(plan["actor"])
        names = {"fsdp": "fsdp", "tensor": "tensor", "expert": "expert (even routing)"}
        sent = [f"{getattr(traffic, name) / 1e9:.3g} GB {words}" for name, words in names.items()]
        assert page.locator("#traffic li").all_inner_texts() == sent
        assert "from each rank per micro-batch of 8,192 tokens" in page.inner_text("#traffic h3")
        widths = page.locator("#traffic .reach i").evaluate_all("all => all.map(one => one.clientWidth)")
        assert [width / sum(widths) for width in widths] == pytest.approx(
            [getattr(traffic, name) / traffic.total for name in names], abs=0.01
        )

    def test_findings_have_their_place(self, show, tmp_path):
        file = tmp_path / "job.yaml"
        file.write_text(
            "cluster:\n  num_nodes: 3\n  num_gpus_per_node: 1\n  component_placement:\n"
            "    agent: {node_group: node, placement: '0-2:0-10'}\n"
        )
        plan = roost.plan(file)
        shown = show(plan).inner_text("#findings")
        (finding,) = plan.warnings
        for words in (f"{file}:5:", "cluster.component_placement.agent", finding.what, finding.why, finding.fix):
            assert words in shown


HOSTILE = "</script><script>document.title='taken'</script><img src=x onerror=alert(1)>{{data}}"


class TestSafety:
    def test_names_and_variables_are_text(self, show):
        config = {
            "cluster": {
                "num_nodes": 1,
                "num_gpus_per_node": 1,
                "component_placement": {HOSTILE: {"node_group": "<b>g</b>", "placement": "all"}},
                "node_groups": [
                    {
                        "label": "<b>g</b>",
                        "node_ranks": 0,
                        "env_configs": [{"node_ranks": 0, "env_vars": [{"V": HOSTILE}]}],
                    }
                ],
            }
        }
        page = show(roost.plan(config))
        assert page.title() == "plan: Roost plan"
        assert page.locator("#legend .component b").inner_text() == HOSTILE
        cell(page, 0, 1).click()
        named, variables = facts(page.locator("#details article"))
        assert (variables["V"], named["node group"]) == (HOSTILE, "<b>g</b>")
        assert page.locator("img, main b b").count() == 0

    def test_a_script_that_was_put_in_would_not_run(self, browser, tmp_path, roll):
        """The browser runs the page's own script only, by its hash."""
        file = tmp_path / "plan.html"
        file.write_text(plan_to_html(roll).replace("<footer>", "<script>document.title = 'taken'</script><footer>"))
        page = browser.open(file)
        assert page.locator(".cell").count() == 16
        assert page.title() != "taken"

    def test_the_file_of_a_plan_may_have_any_name(self, show, tmp_path):
        folder = tmp_path / "<i>&\"'"
        folder.mkdir()
        (folder / "job.yaml").write_text(
            "cluster: {num_nodes: 1, num_gpus_per_node: 1, component_placement: {actor: all}}"
        )
        page = show(roost.plan(folder / "job.yaml"))
        assert page.inner_text("h1") == str(folder / "job.yaml")
        assert page.title() == f"{folder / 'job.yaml'}: Roost plan"


class TestLooks:
    @pytest.mark.parametrize("width", [1280, 800])
    def test_nothing_is_wider_than_the_window(self, show, heterogeneous, width):
        page = show(heterogeneous, viewport={"width": width, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        cell(page, 2, 4).click()
        assert page.is_visible("#details article")

    def test_dark_and_light(self, show, roll):
        ground = "getComputedStyle(document.body).backgroundColor"
        assert show(roll, color_scheme="dark").evaluate(ground) != show(roll, color_scheme="light").evaluate(ground)

    def test_print(self, show, heterogeneous):
        page = show(heterogeneous)
        page.emulate_media(media="print")
        assert not page.is_visible("#nodes")
        assert page.is_visible("#phases")

    def test_no_accelerators_at_all(self, show):
        page = show(
            roost.plan({"cluster": {"num_nodes": 1, "component_placement": {"agent": "0:0-2"}}}, {"nodes": [{}]})
        )
        assert cell(page, 0, 1).inner_text().split() == ["CPU", "A", "0-2"]

    def test_many_accelerators_and_many_holders(self, show):
        placement = {f"role_{number}": "all" for number in range(9)}
        page = show(
            roost.plan(
                {"cluster": {"num_nodes": 1, "component_placement": placement}}, {"nodes": [{"accelerators": 64}]}
            )
        )
        assert page.locator(".cell").count() == 64
        assert cell(page, 0, 64).locator(".stripe").all_inner_texts()[-1] == "+6"
        cell(page, 0, 64).click()
        assert page.locator("#details article").count() == 9


@pytest.fixture(scope="module")
def large():
    """The page of 4,096 nodes of eight, with components that share, span and spread."""
    plan = roost.plan(
        {
            "num_gpus_per_node": 8,
            "actor_train": {"device_mapping": "list(range(0,24576))"},
            "actor_infer": {"device_mapping": "list(range(0,16384))", "num_gpus_per_worker": 16},
            "reference": {"device_mapping": "list(range(24576,30000))"},
            "rewards": {"judge": {"device_mapping": "list(range(30000,32000))"}, "code": {"world_size": 100_000}},
        },
        {"nodes": [{"count": 4096, "accelerators": 8, "accelerator_model": "H100", "memory_gb": 80}]},
    )
    return plan_to_html(plan)


@pytest.fixture(scope="module")
def irregular():
    """As many nodes, with devices in an order that nobody would write, so that no two nodes are alike."""
    devices = list(range(32768))
    chance = random.Random(0)
    orders = [chance.sample(devices, len(devices)) for _ in range(3)]
    roles = ("actor_train", "actor_infer", "reference")
    plan = roost.plan(
        {"num_gpus_per_node": 8} | {role: {"device_mapping": order} for role, order in zip(roles, orders, strict=True)}
    )
    return plan_to_html(plan)


class TestLarge:
    @pytest.mark.parametrize("name", ["large", "irregular"])
    def test_size(self, show, request, name):
        html = request.getfixturevalue(name)
        page = show(html)
        assert len(html.encode()) < 5_000_000
        assert "4,096 nodes" in page.inner_text("#shown")
        assert page.is_visible("#overview")

    def test_equal_nodes_are_one_row(self, show, large):
        page = show(large)
        assert labels(page)[:2] == ["nodes 0-1694, every 2nd", "nodes 1-1695, every 2nd"]
        assert cell(page, 0, 1).inner_text().split() == ["A", "R"]
        assert len(labels(page)) == 8

    def test_every_node_can_be_shown(self, show, large):
        page = show(large)
        page.click("#unfold")
        assert page.get_attribute("#grid", "aria-rowcount") == "4096"
        assert page.locator(".rows .row").count() < 100, "only what is in sight is in the document"
        page.locator("#grid").evaluate("grid => grid.scrollTop = grid.scrollHeight")
        page.wait_for_selector("text=node 4095")
        page.fill("#nodes", "4090-4095")
        assert labels(page) == [f"node {node}" for node in range(4090, 4096)]

    def test_the_overview_leads_to_a_node(self, show, large):
        page = show(large)
        page.click("#overview", position={"x": 60, "y": 2})
        assert labels(page) == [f"node {page.input_value('#nodes')}"]

    def test_ranks_far_down_are_right(self, show, large):
        page = show(large)
        page.fill("#nodes", "2001")
        cell(page, 0, 3).click()
        shown = {
            card.locator("h3").inner_text().split()[1]: facts(card)[0]
            for card in page.locator("#details article").all()
        }
        assert shown["actor"]["rank"] == f"{2001 * 8 + 2} of 24,576"
        assert shown["rollout"]["rank"] == "1000 of 1,024"
        assert (shown["rollout"]["runs on"], shown["rollout"]["devices"]) == ("node 2000", "0-7; node 2001: 0-7")

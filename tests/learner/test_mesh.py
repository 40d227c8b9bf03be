"""The mesh of a learner's ranks: its sizes, and ranks that learn as one does on each mesh."""

import dataclasses
from functools import partial
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM

from roost.config.job import MeshSizes, ParallelSizes
from roost.config.train import AdapterSettings, LossSettings, OptimizerType
from roost.engines.protocol import InFlight
from roost.engines.weights.carriers import write_checkpoint
from roost.engines.weights.source import WeightStream
from roost.learner.adapter import add_adapter
from roost.learner.distributed import rank as rank_of
from roost.learner.forward import Head, logprobs_and_entropy
from roost.learner.learner import Learner
from roost.learner.parallel.mesh import check_experts, expert_modules
from roost.learner.parallel.tensor import _styles, check_even
from roost.learner.parallel.vocabulary import VocabularyShard
from roost.learner.sample import PAD
from roost.placement.memory.model import DIVIDED_LOGIT_BYTES, LOGIT_BYTES
from roost.placement.rules.mesh import WITH_IMAGES, WITHOUT_TENSOR_PLAN
from roost.torch_engine.engine import EngineSettings, TorchEngine
from roost.torch_engine.server import WeightUpdater
from roost.vision.processor import FAMILIES
from tests.learner.random_samples import CPU, random_samples, settings_of, totals_of
from tests.learner.ranks import EXPERT, MESHES, meet_in_pairs, on_ranks, ranks_of, sizes_of, weights

# Samples of four ranks in each step: one rank has none, and lengths do not divide.
SHARES = [
    [random_samples(12, 5, seed=1), random_samples(7, seed=2), random_samples(33, 2, seed=3), []],
    [random_samples(6, seed=5), random_samples(31, 5, seed=6), random_samples(17, seed=7), random_samples(3, seed=8)],
]
TOTALS = [totals_of([sample for share in shares for sample in share]) for shares in SHARES]


def routed(sample):
    """The sample with two of eight experts for each token and layer, as if an engine had chosen them."""
    every = np.tile(np.arange(8, dtype=np.uint8), (len(sample), 2, 1))
    return dataclasses.replace(sample, routed_experts=np.random.default_rng(0).permuted(every, axis=-1)[..., :2])


def masked(sample):
    """The sample with the four ids that each generated token was sampled from."""
    ids = (sample.token_ids[sample.is_generated, None] + [0, 7, 31, 99]) % 256
    sizes = np.where(sample.is_generated, 4, 0).astype(np.int32)
    return dataclasses.replace(sample, mask_ids=ids.astype(np.int32).ravel(), mask_sizes=sizes)


def changed(change):
    """The samples of each step and rank, all but the first of each rank with a change."""
    return [[[*share[:1], *map(change, share[1:])] for share in shares] for shares in SHARES]


SIZES = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8}
ENTROPY = LossSettings(entropy_coef=0.01)
RECOMPUTED = {"activation_checkpointing": True}
TENSOR = [mesh for mesh in MESHES if mesh.tensor > 1]
MIXTURE = [*(mesh for mesh in MESHES if mesh.tensor == 1), *EXPERT]
OF_ONE_BATCH = [MeshSizes(context=2), MeshSizes(context=4, expert=4), MeshSizes(context=2, tensor=2, expert=2)]
BALANCED = {"router_aux_loss_coef": 0.5, **RECOMPUTED}  # of micro-batches, which are those of one rank here
SAMPLED = {"min_new_tokens": 2, "repetition_penalty": 1.3, "temperature": 0.8, "loss": ENTROPY}
UNEVEN = {"hidden_size": 36, "intermediate_size": 130, "vocab_size": 258}
CHANGED = {"replayed": changed(routed), "sampled": changed(masked)}
# Weights of these are sent to an engine, and these also learn on from the checkpoint of another mesh.
SENT = {"qwen2": MESHES, "mixture": EXPERT}
# One family on every mesh, another where its own norms are divided, adapter and critic where weights are twice.
CASES = {
    "qwen2": ("qwen2", {"tie_word_embeddings": True}, {}, Head.POLICY, MESHES),
    "qwen3": ("qwen3", {}, {"loss": ENTROPY, **RECOMPUTED}, Head.POLICY, [*TENSOR, MeshSizes(1, 2, 2, 1)]),
    "adapter": ("llama", {}, {"adapter": AdapterSettings(lora_rank=4)}, Head.POLICY, [MeshSizes(1, 2, 1, 2)]),
    "critic": ("llama", {"pad_token_id": 0}, {}, Head.VALUE, [MeshSizes(1, 2, 1, 2)]),
    "mixture": ("qwen3_moe", {}, {}, Head.POLICY, MIXTURE),
    "balanced": ("qwen2_moe", {}, BALANCED, Head.POLICY, OF_ONE_BATCH),
    # Its shared expert is whole on each rank of a tensor group.
    "shared": (
        "qwen2_moe",
        {"shared_expert_intermediate_size": 32},
        {"adapter": AdapterSettings(lora_rank=4)},
        Head.POLICY,
        [MeshSizes(shard=2, tensor=2, expert=2)],
    ),
    # Some samples have the engine's experts, or the ids that tokens were sampled from, and others have none.
    "replayed": ("qwen3_moe", {}, {"router_replay": True, **RECOMPUTED}, Head.POLICY, OF_ONE_BATCH[-1:]),
    "sampled": ("qwen3", {}, SAMPLED, Head.POLICY, [MeshSizes(context=2, tensor=2)]),
    # FSDP divides the rows of a tensor rank unevenly.
    "uneven": ("qwen2", UNEVEN, {}, Head.POLICY, [MeshSizes(shard=2, tensor=2)]),
    "frozen": ("mixtral", {}, {"adapter": AdapterSettings(lora_rank=4)}, Head.POLICY, [MeshSizes(shard=4, expert=2)]),
}
# In bfloat16, and with Muon, whose matrices are gathered over both dimensions.
ROUNDED = {"qwen3": [MeshSizes(tensor=2), MeshSizes(context=2)], "mixture": [MeshSizes(shard=2, expert=2)]}
ROUNDED_RUNS = [(name, mesh) for name, meshes in ROUNDED.items() for mesh in meshes]
MUON_MESH = MeshSizes(shard=2, tensor=2)
RUNS = [(name, mesh) for name, (*_, meshes) in CASES.items() for mesh in meshes]
OTHER = ["vocabulary", "logits", "muon", *(("rounded", *run) for run in ROUNDED_RUNS)]


def shares_of(name, ranks):
    """Samples of each step and rank; a critic's have returns and values."""
    steps = [
        [[each for share in shares[rank::ranks] for each in share] for rank in range(ranks)]
        for shares in CHANGED.get(name, SHARES)
    ]
    if CASES[name][3] is Head.POLICY:
        return steps
    return [[[with_returns(sample) for sample in share] for share in shares] for shares in steps]


def with_returns(sample):
    values = np.linspace(0, 1, len(sample), dtype=np.float32)
    return dataclasses.replace(sample, returns=values, values=values / 2)


def learn_on_meshes(rank, settings, folder):
    """Results of each run that this rank is in, and whether a divided vocabulary gives the log-probs of a whole one.

    Two worlds of two ranks work side by side, each on half of the meshes of two.
    """
    folder = Path(folder)
    found = {"vocabulary": divided_vocabulary(rank), "logits": logit_bytes()}
    latest = {}  # of each case, the last run on four ranks
    for run in RUNS:
        if ranks_of(run[1]) == 4:
            found[run] = learn_and_resume(rank, run, settings[run[0]], folder, latest.get(run[0]))
            latest[run[0]] = run
    found["muon"] = learn_twice(rank, with_muon(settings["qwen3"]), MUON_MESH)
    meet_in_pairs(rank, folder)
    pairs = [run for run in RUNS if ranks_of(run[1]) == 2]
    for run in pairs[rank // 2 :: 2]:
        found[run] = learn_and_resume(rank % 2, run, settings[run[0]], folder, latest.get(run[0]))
    for number, (name, mesh) in enumerate(ROUNDED_RUNS):
        if number % 2 == rank // 2:
            found["rounded", name, mesh] = learn_twice(rank % 2, in_bfloat16(settings[name]), mesh)
    return found


def in_bfloat16(settings):
    return dataclasses.replace(settings, compute_dtype="bfloat16", **RECOMPUTED)


def with_muon(settings):
    return dataclasses.replace(
        settings, optimizer=dataclasses.replace(settings.optimizer, optimizer=OptimizerType.MUON)
    )


def learn_twice(rank, settings, mesh):
    learner = Learner(dataclasses.replace(settings, parallel=sizes_of(mesh)), CPU)
    shares = shares_of("qwen3", ranks_of(mesh))
    learnt = [learner.learn(share[rank], totals) for share, totals in zip(shares, TOTALS, strict=True)]
    return {"learnt": learnt, "weights": weights(learner)}


def learn_and_resume(rank, run, settings, folder, other):
    """Learn, and learn the last step again from a checkpoint of one process, and of another mesh (None: of none)."""
    name, mesh = run
    head, shares = CASES[name][3], shares_of(name, ranks_of(mesh))
    learner = Learner(dataclasses.replace(settings, parallel=sizes_of(mesh)), CPU, head)
    assert learner._mesh.sizes == mesh
    say = learner.score if head is Head.POLICY else learner.values
    said = say(shares[0][rank])
    learner.offload()
    learner.load()
    learnt = [learner.learn(shares[0][rank], TOTALS[0])]
    learner.save(folder / str(RUNS.index(run)))
    learner.wait_saved()
    learnt.append(learner.learn(shares[1][rank], TOTALS[1]))
    trained = weights(learner)
    if mesh in SENT.get(name, ()):
        send(learner, folder / f"sent {RUNS.index(run)}")
    resumed = []
    others = [] if other is None or mesh not in SENT.get(name, ()) else [str(RUNS.index(other))]
    for saved in (f"{name} of one", *others):
        learner.restore(folder / saved)
        learner.learn(shares[1][rank], TOTALS[1])
        resumed.append(weights(learner))
    return {"said": said, "learnt": learnt, "weights": trained, "resumed": resumed}


def send(learner, folder):
    """Write a checkpoint for engines, as a weight sync does."""
    stream = WeightStream(learner.module, torch.float32)
    if rank_of() == 0:
        write_checkpoint(stream, learner._settings.model, folder)
    stream.finish()


def divided_vocabulary(rank):
    """Largest differences of log-probs, entropies and gradients from those of whole logits, without and with masks."""
    torch.manual_seed(0)
    whole = torch.randn(5, 24, requires_grad=True)
    targets = torch.tensor([0, 5, 6, 17, 23])
    masks = torch.tensor([[0, 23, PAD], [5, PAD, PAD], [PAD] * 3, [17, 18, 1], [23, 2, 3]], dtype=torch.int32)
    shard = VocabularyShard(dist.group.WORLD, 6 * rank, 6)
    differences = []
    for given in (None, masks):
        part = whole.detach()[:, 6 * rank : 6 * rank + 6].clone().requires_grad_()
        found = shard.logprobs(part, targets, 0.7, True, given)
        expected = logprobs_and_entropy(whole, targets, 0.7, True, given)
        differences += [float((one - other).detach().abs().max()) for one, other in zip(found, expected, strict=True)]
        for one, weighed in ((found, part), (expected, whole)):
            weighed.grad = None
            (one[0] * torch.arange(1.0, 6.0) + one[1]).sum().backward()
        differences.append(float((part.grad - whole.grad[:, 6 * rank : 6 * rank + 6]).abs().max()))
    differences.append(float((shard.whole(part) - whole).detach().abs().max()))
    picked = shard.picked(part, torch.tensor([[0, 23]]).expand(5, 2))
    differences.append(float((picked - whole[:, [0, 23]]).detach().abs().max()))
    return differences


def logit_bytes():
    """Most bytes for each logit of a chunk: divided, the same with its entropy learnt, and whole without a compiler."""
    count, size, hidden = 128, 4096, 32
    last = nn.Linear(hidden, size, bias=False, dtype=torch.bfloat16)
    states = torch.randn(count, hidden, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.arange(count)
    shard = VocabularyShard(dist.group.WORLD, 0, size)
    found = []
    for of_chunk in (
        lambda each: shard.logprobs(shard.logits(each, last), targets, 1.0, False, None),
        lambda each: shard.logprobs(shard.logits(each, last), targets, 1.0, True, None),
        lambda each: logprobs_and_entropy(last(each), targets, 1.0, False),
    ):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            sum(checkpoint(of_chunk, states, use_reentrant=False)).sum().backward()
        events = profiled.profiler.kineto_results.events()
        held = accumulate(event.nbytes() for event in events if event.name() == "[memory]")
        found.append((max(held) - last.weight.nbytes) / (count * size))
        last.weight.grad = states.grad = None
    return found


@pytest.fixture(scope="module")
def settings(models):
    return {
        name: settings_of(models(family, **SIZES, **sizes), **changes)
        for name, (family, sizes, changes, *_) in CASES.items()
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("meshes")


@pytest.fixture(scope="module")
def alone(settings, folder):
    """A learner of each case in one process: what it said and learnt."""
    found = {}
    for name, (*_, head, _) in CASES.items():
        learner = Learner(settings[name], CPU, head)
        shares = [share for (share,) in shares_of(name, 1)]
        said = (learner.score if head is Head.POLICY else learner.values)(shares[0])
        learnt = [learner.learn(shares[0], TOTALS[0])]
        learner.save(folder / f"{name} of one")
        learner.wait_saved()
        learnt.append(learner.learn(shares[1], TOTALS[1]))
        said = {id(sample): each for sample, each in zip(shares[0], said, strict=True)}
        found[name] = {"learner": learner, "said": said, "learnt": learnt, "weights": weights(learner)}
    return found


@pytest.fixture(scope="module")
def meshes(settings, alone, folder):
    """Results of the ranks of each run: one start for all, as importing torch is slow."""
    of_ranks = on_ranks(4, learn_on_meshes, settings, str(folder))
    return {key: [found[key] for found in of_ranks if key in found] for key in [*RUNS, *OTHER]}


@pytest.mark.long
@pytest.mark.parametrize("run", RUNS, ids=[f"{name}-{dataclasses.astuple(mesh)}" for name, mesh in RUNS])
def test_every_mesh_is_as_one_process(alone, meshes, folder, run):
    name, mesh = run
    one = alone[name]
    assert len(meshes[run]) == ranks_of(mesh)
    for found in meshes[run]:
        for given, expected in zip(found["learnt"], one["learnt"], strict=True):
            assert given == pytest.approx(expected, rel=1e-4, abs=1e-5)
            assert given["grad/norm"] == pytest.approx(expected["grad/norm"], rel=1e-5)
        near(found["weights"], one["weights"])
        for resumed in found["resumed"]:
            near(resumed, one["weights"])
    said = [each for found in meshes[run] for each in found["said"]]
    shares = [sample for share in shares_of(name, ranks_of(mesh))[0] for sample in share]
    if CASES[name][3] is Head.POLICY:
        for sample, given in zip(shares, said, strict=True):
            np.testing.assert_allclose(given, one["said"][id(sample)], atol=1e-4)
    learner = one["learner"]
    learner.restore(folder / str(RUNS.index(run)))
    learner.learn([share for (share,) in shares_of(name, 1)][1], TOTALS[1])
    near(weights(learner), one["weights"])


@pytest.mark.long
@pytest.mark.parametrize("name", SENT)
def test_an_engine_takes_the_weights_of_every_mesh(settings, alone, meshes, folder, name):
    send(alone[name]["learner"], folder / f"{name} sent by one")
    engine = TorchEngine(EngineSettings(settings[name].model, device="cpu"))
    updater = WeightUpdater(engine)
    engine.pause(InFlight.HOLD)
    found = []
    try:
        for sent in (f"{name} sent by one", *(f"sent {RUNS.index((name, mesh))}" for mesh in SENT[name])):
            engine.between_steps(partial(updater.reload, str(folder / sent)))
            found.append({key: weight.numpy().copy() for key, weight in engine.named_weights().items()})
    finally:
        engine.close()
    for weights_of_engine in found:
        near(weights_of_engine, found[0])


@pytest.mark.long
def test_every_mesh_resumes_on_another(meshes):
    """All but the first of four ranks have also learnt on from the checkpoint of another; see the test above."""
    counts = {run: {len(found["resumed"]) for found in meshes[run]} for run in RUNS}
    fours = [mesh for mesh in MESHES if ranks_of(mesh) == 4]
    assert [mesh for mesh in MESHES if counts["qwen2", mesh] != {2}] == fours[:1]
    assert all(counts["mixture", mesh] == {2} for mesh in EXPERT)


@pytest.mark.long
def test_a_divided_vocabulary_has_the_logprobs_of_a_whole_one(meshes):
    assert max(difference for of_rank in meshes["vocabulary"] for difference in of_rank) < 1e-5


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "mesh"), ROUNDED_RUNS, ids=[f"{name}-{dataclasses.astuple(mesh)}" for name, mesh in ROUNDED_RUNS]
)
def test_a_mesh_in_bfloat16_is_near_one_process(settings, meshes, name, mesh):
    one = learn_twice(0, in_bfloat16(settings[name]), MeshSizes())
    assert len(meshes["rounded", name, mesh]) == 2
    for found in meshes["rounded", name, mesh]:
        for key in ("loss", "grad/norm"):
            assert found["learnt"][0][key] == pytest.approx(one["learnt"][0][key], rel=0.02), key


@pytest.mark.long
def test_muon_on_a_mesh_is_as_in_one_process(settings, meshes):
    one = learn_twice(0, with_muon(settings["qwen3"]), MeshSizes())
    assert len(meshes["muon"]) == 4
    for found in meshes["muon"]:
        near(found["weights"], one["weights"])


@pytest.mark.long
def test_logits_take_no_more_memory_than_plans_count(meshes):
    for divided, learnt, whole in meshes["logits"]:
        assert max(divided, learnt) < DIVIDED_LOGIT_BYTES and whole < LOGIT_BYTES


def learn_unevenly(rank, settings, shares, totals):
    learner = Learner(settings, CPU)
    return {"learnt": learner.learn(shares[rank], totals), "weights": weights(learner)}


@pytest.mark.long
def test_a_rank_without_tokens_recomputes_with_the_others(models):
    """Its last micro-batches are empty, but its experts get tokens of the other rank, also in recomputation."""
    plain = settings_of(models("qwen3_moe"), micro_batch_tokens=48, **RECOMPUTED)
    shares = [random_samples(31, 40, 17, 45, seed=3), random_samples(9, seed=4)]
    totals = totals_of([sample for share in shares for sample in share])
    one = Learner(plain, CPU)
    expected = one.learn([sample for share in shares for sample in share], totals)
    divided = dataclasses.replace(plain, parallel=ParallelSizes(expert=2))
    for found in on_ranks(2, learn_unevenly, divided, shares, totals):
        assert found["learnt"]["grad/norm"] == pytest.approx(expected["grad/norm"], rel=1e-5)
        near(found["weights"], weights(one))


def near(found, expected):
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        np.testing.assert_allclose(found[name], weight, rtol=0, atol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    ("sizes", "ranks", "expected"),
    [
        pytest.param(ParallelSizes(), 4, MeshSizes(shard=4), id="fsdp"),
        pytest.param(ParallelSizes(shard=2), 8, MeshSizes(replicate=4, shard=2), id="hsdp"),
        pytest.param(ParallelSizes(context=2), 4, MeshSizes(shard=2, context=2), id="context"),
        pytest.param(ParallelSizes(tensor=2, context=2), 8, MeshSizes(1, 2, 2, 2), id="context and tensor"),
        pytest.param(ParallelSizes(tensor=2, context=2, shard=4), 16, MeshSizes(2, 2, 2, 2), id="all"),
        pytest.param(ParallelSizes(tensor=2, shard=1), 4, MeshSizes(replicate=2, tensor=2), id="without fsdp"),
        pytest.param(ParallelSizes(expert=4, shard=8), 16, MeshSizes(replicate=2, shard=8, expert=4), id="experts"),
        pytest.param(ParallelSizes(expert=4, context=4), 4, MeshSizes(context=4, expert=4), id="experts over context"),
    ],
)
def test_sizes_of_a_mesh(sizes, ranks, expected):
    mesh = MeshSizes.of(sizes, ranks)
    assert mesh == expected
    assert mesh.data * mesh.model == ranks == mesh.averaged * mesh.tensor


@pytest.mark.parametrize(
    ("sizes", "ranks", "reason"),
    [
        pytest.param(ParallelSizes(tensor=2), 3, "3 ranks cannot be divided into tensor groups of 2", id="tensor"),
        pytest.param(ParallelSizes(context=2), 1, "1 ranks cannot be divided into context groups of 2", id="context"),
        pytest.param(ParallelSizes(context=2, tensor=2), 6, "context groups of 2 times tensor groups of 2", id="both"),
        pytest.param(ParallelSizes(shard=2, context=4), 8, "FSDP over 2 ranks cannot be", id="fsdp below context"),
        pytest.param(
            ParallelSizes(expert=4, shard=2),
            4,
            "copies of 2 ranks cannot be divided into expert groups of 4",
            id="expert",
        ),
        pytest.param(ParallelSizes(shard=4, tensor=4), 8, "FSDP groups of 4 times tensor size 4", id="too few"),
    ],
)
def test_sizes_that_cannot_be(sizes, ranks, reason):
    with pytest.raises(ValueError, match=reason):
        MeshSizes.of(sizes, ranks)


@pytest.mark.parametrize(
    ("family", "sizes", "ranks", "reason"),
    [
        pytest.param("qwen2", ParallelSizes(expert=2), 2, "Qwen2ForCausalLM has no experts that Roost", id="dense"),
        pytest.param("qwen3_moe", ParallelSizes(tensor=2), 2, "write an expert size that is a multiple", id="tensor"),
        pytest.param("qwen3_moe", ParallelSizes(expert=3), 3, "does not divide the model's 8 experts", id="experts"),
        pytest.param("qwen3_moe", ParallelSizes(expert=2), 6, "FSDP over 3 ranks cannot divide the 64", id="rows"),
    ],
)
def test_experts_that_cannot_be_divided(models, family, sizes, ranks, reason):
    model = AutoModelForCausalLM.from_pretrained(models(family))
    with pytest.raises(ValueError, match=reason):
        check_experts(model, MeshSizes.of(sizes, ranks))


def test_experts_of_other_families_are_not_divided():
    """They may hold their weights alike, but weigh or call them otherwise."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "vocab_size": 32}
    config = AutoConfig.for_model("olmoe", num_hidden_layers=1, num_experts=4, **sizes)
    model = AutoModelForCausalLM.from_config(config)
    assert list(expert_modules(model))
    with pytest.raises(ValueError, match=r"OlmoeForCausalLM has no experts that Roost divides \(mixtral, "):
        check_experts(model, MeshSizes.of(ParallelSizes(expert=2), 2))


def test_an_embedding_that_does_more_than_look_up_is_not_divided():
    config = AutoConfig.for_model(
        "gemma3_text", hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=32
    )
    with pytest.raises(ValueError, match="ScaledWordEmbedding of Gemma3ForCausalLM cannot be divided"):
        list(_styles(AutoModelForCausalLM.from_config(config)))


@pytest.mark.parametrize("family", WITHOUT_TENSOR_PLAN)
def test_families_that_plans_refuse_to_divide_cannot_be_divided(family):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family))
    with pytest.raises(ValueError, match=r"tensor-parallel plan|is not supported|cannot be divided"):
        list(_styles(model))


def test_families_that_read_images_are_those_that_plans_accept():
    assert WITH_IMAGES == FAMILIES


@pytest.mark.parametrize("adapter", [None, AdapterSettings(lora_rank=2)], ids=["whole", "adapter"])
def test_layers_that_tensor_groups_cannot_divide(models, adapter):
    model = AutoModelForCausalLM.from_pretrained(models("llama", intermediate_size=130))
    if adapter is not None:
        add_adapter(model, adapter, torch.float32)
    styles = dict(_styles(model))
    check_even(model, styles, 2)
    with pytest.raises(ValueError, match=r"tensor size 4 does not divide the 130 units of model\.layers\.0\.mlp"):
        check_even(model, styles, 4)

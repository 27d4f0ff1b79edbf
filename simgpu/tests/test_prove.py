"""`simgpu.prove`: what it is asked, what it says, and the parts of which it is made."""

import os
import sys
from collections import UserDict

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DistributedSampler

from simgpu import Finding, Report, assert_same_on_worlds, prove
from simgpu._prove import command, run
from simgpu._prove.combine import combine, together
from simgpu._prove.compare import first_difference
from simgpu._prove.inputs import difference, part_of, tensors_in
from simgpu._prove.names import Names, Ties
from simgpu._prove.noise import Rounding
from simgpu._prove.record import Mask, Moments, RankRecord, Step
from simgpu._prove.recorder import Recorder, _host, _local
from simgpu._prove.rounding import Allowed
from simgpu._prove.within import look

# -- what it is asked -----------------------------------------------------------------


def square() -> None:
    """A program as a function: a step of a linear layer, on the whole batch."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.manual_seed(int(os.environ["RANK"]))
    model = nn.Linear(4, 1).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 4, device="cuda")).square().mean().backward()
    optimizer.step()


def test_a_function_is_a_program_too():
    report = prove(square, (1, 2))
    (finding,) = report.findings
    assert (finding.step, finding.stage) == (0, "parameters")


def parted() -> None:
    """SGD for the weights and AdamW for the biases; a validation with a sampler."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    x = torch.randn(8, 4)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1)).cuda()
    parallel = DDP(model, device_ids=[torch.cuda.current_device()])
    weights, biases = ([p for p in model.parameters() if p.ndim == n] for n in (2, 1))
    optimizers = torch.optim.SGD(weights, lr=0.1), torch.optim.AdamW(biases, lr=0.1)
    sampler = DistributedSampler(range(8))
    for _ in range(3):
        parallel(x[rank::ranks].cuda()).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            for sample in sampler:
                model(x[sample : sample + 1].cuda())
    dist.destroy_process_group()


def test_several_optimizers_and_a_validation_are_right():
    report = assert_same_on_worlds(parted, (1, 2))
    assert report.steps == 3


def two_rates() -> None:
    """Of two optimizers, the second has a learning rate that depends on the ranks."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1)).cuda()
    first, second, third = (list(part.parameters()) for part in model)
    assert second == []
    (weight, bias), ranks = third, int(os.environ["WORLD_SIZE"])
    groups = [{"params": first[:1]}, {"params": first[1:], "lr": 0.2}]
    optimizers = (
        torch.optim.SGD(groups, lr=0.1),
        torch.optim.SGD([{"params": [weight]}, {"params": [bias]}], lr=0.1 * ranks),
    )
    model(torch.ones(2, 4, device="cuda")).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()


def test_settings_of_the_second_optimizer_are_compared_too():
    (finding,) = prove(two_rates, (1, 2)).findings
    assert (finding.stage, finding.place) == ("settings", "group 2, lr")


class OfDictionaries(nn.Module):
    """Reads a batch as a tokenizer makes it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, batch):
        return self.linear(batch["images"]["pixels"])


def unshared() -> None:
    """Counts FLOPs on "meta" first; then each rank is given the first half."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    with torch.device("meta"):
        OfDictionaries()({"images": {"pixels": torch.ones(8, 4)}})
    torch.manual_seed(0)
    model = OfDictionaries().cuda()
    parallel = DDP(model, device_ids=[torch.cuda.current_device()])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mine = torch.randn(8, 4)[: 8 // dist.get_world_size()].cuda()
    parallel({"images": {"pixels": mine}}).square().mean().backward()
    optimizer.step()
    dist.destroy_process_group()


def test_samples_are_found_in_dictionaries_and_no_model_is_one_on_meta():
    (finding,) = prove(unshared, (1, 2)).findings
    assert (finding.step, finding.stage) == (0, "samples")
    assert "all ranks were given the same 4 samples" in finding.text


def test_there_must_be_a_script_and_two_worlds(tmp_path):
    with pytest.raises(FileNotFoundError, match="no script"):
        prove(tmp_path / "train.py", (1, 2))
    with pytest.raises(ValueError, match="above 1"):
        prove(square, (1,))


@pytest.mark.parametrize(
    "text, words",
    [
        ("raise KeyError('no data')", "on one rank: KeyError: 'no data'"),
        ("raise RuntimeError('====\\nno data here\\n====')",  # ruled off
         "on one rank: RuntimeError: no data here"),
        ("import torch", "taken no step"),
    ],
)  # fmt: skip
def test_a_program_that_fails_or_takes_no_step_is_refused(tmp_path, text, words):
    script = tmp_path / "train.py"
    script.write_text(text)
    with pytest.raises(ValueError, match=words):
        prove(script, (1, 2))


# -- as a command, and as a check in a test -------------------------------------------

# a step of a linear layer on the whole batch; right if the seeds of all ranks are equal
SCRIPT = """
import os, sys, torch
folder, word, ranks = sys.argv[1:]
assert word == 'hello' and os.listdir(folder) == [], sys.argv
assert ranks == os.environ['WORLD_SIZE'], sys.argv
torch.cuda.set_device(int(os.environ['LOCAL_RANK']))
torch.manual_seed({seed})
model = torch.nn.Linear(2, 1).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(1, 2, device='cuda')).sum().backward()
optimizer.step()
"""
WORDS = ["--worlds", "1,2", "--", "{folder}", "hello", "{ranks}"]


@pytest.mark.parametrize(
    "seed, status, said",
    [(0, 0, "1 steps on 1, 2 ranks"),
     ("int(os.environ['RANK'])", 1,
      "2 ranks, step 0, parameters of weight: the ranks differ")],
)  # fmt: skip
def test_the_command_passes_arguments_and_a_new_folder_and_says_what_it_found(
    tmp_path, capsys, seed, status, said
):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(seed=seed))
    assert command.main([str(script), *WORDS]) == status, capsys.readouterr()
    assert said in capsys.readouterr().out


def test_on_a_terminal_a_line_says_which_run_it_is(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with run._Line(2) as line:
        line.next(1)
        line.next(4)
    shown = capsys.readouterr().err
    words = [part for part in shown.split("\r") if part.strip()]
    assert words[0].rstrip() == "prove: run 1 of 2, on 1 rank"
    assert words[-1] == "prove: run 2 of 2, on 4 ranks"
    assert shown.endswith("\r") and "\n" not in shown


def test_a_module_is_found_from_the_current_folder(tmp_path, monkeypatch, capsys):
    package = tmp_path / "mine"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "seeds.py").write_text("SEED = 0\n")
    script = "from .seeds import SEED\n" + SCRIPT.format(seed="SEED")
    (package / "train.py").write_text(script)
    monkeypatch.chdir(tmp_path)
    status = command.main(["-m", "mine.train", *WORDS])
    assert status == 0, capsys.readouterr()


@pytest.mark.parametrize(
    "words, why",
    [
        (["nowhere.py"], "there is no script nowhere.py"),
        (["nowhere.py", "--worlds", "1"], "name at least one number of ranks above 1"),
    ],
)
def test_what_cannot_be_run_exits_with_two(words, why, capsys):
    assert command.main(words) == 2
    assert why in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, why",
    [
        (["train.py", "--worlds", "two"], "write numbers of ranks, such as 1,2"),
        (["train.py", "--lr", "1"], "stands behind --: simgpu prove train.py -- --lr"),
        (["-m", "a.train", "--lr", "1"], "simgpu prove -m a.train -- --lr"),
    ],
)
def test_words_that_the_command_does_not_know(words, why, capsys):
    with pytest.raises(SystemExit) as ended:
        command.main(words)
    assert ended.value.code == 2 and why in capsys.readouterr().err


def test_a_program_that_differs_fails_a_test_with_the_report(monkeypatch):
    finding = Finding(2, 3, "gradient", "head.weight", "twice that of one rank")
    report = Report((1, 2), 8, (finding,))
    monkeypatch.setattr(run, "prove", lambda *args, **kwargs: report)
    with pytest.raises(AssertionError) as failed:
        assert_same_on_worlds("train.py")
    assert str(failed.value) == str(report)
    assert "2 ranks, step 3, gradient of head.weight: twice" in str(failed.value)


def with_a_master_copy() -> None:
    """Half precision: the optimizer updates copies in float32, which are copied back.

    Its table of words has sparse gradients.
    """
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.manual_seed(0)
    model = nn.Embedding(8, 4, sparse=True).cuda()
    (parameter,) = model.parameters()
    master = parameter.detach().clone()
    optimizer = torch.optim.SGD([master], lr=0.1)
    for _ in range(2):
        model(torch.arange(8, device="cuda")).square().sum().backward()
        master.grad = parameter.grad.to_dense()
        optimizer.step()
        parameter.data.copy_(master)
        parameter.grad = None


def test_copies_that_the_optimizer_updates_are_right():
    assert_same_on_worlds(with_a_master_copy, (1, 2))


# -- its parts -------------------------------------------------------------------------


def step_of(gradient: np.ndarray, samples: list[int]) -> RankRecord:
    inputs = {"x": [part_of(np.array(samples))]}
    step = Step(inputs=inputs, losses=[1.0], before={"w": np.ones(3)})
    step.raw = step.used = {"w": gradient}
    step.after = step.later = {"w": np.ones(3) - gradient}
    return RankRecord(0, [step])


def compare(*gradients: np.ndarray, samples=((1,), (2,))):
    shapes = {"w": np.ones(3)}
    one = combine([step_of(np.ones(3), [1, 2])], shapes)
    noisy = combine([step_of(np.ones(3) * (1 + 1e-6), [1, 2])], shapes)
    many = [step_of(g, list(s)) for g, s in zip(gradients, samples, strict=True)]
    return first_difference(2, combine(many, shapes), one, Allowed(one, [noisy]))


def test_rounding_is_allowed_and_ten_times_more():
    assert compare(np.ones(3) * (1 + 5e-6), np.ones(3) * (1 + 5e-6)) is None
    found = compare(np.ones(3) * (1 + 1e-4), np.ones(3) * (1 + 1e-4))
    assert found.stage == "gradient"


def test_gradients_that_differ_between_ranks_are_not_averaged():
    found = compare(np.ones(3) * 0.5, np.ones(3) * 1.5)
    assert found.stage == "gradient"
    assert "differ from their mean by 50.00%" in found.text


def test_a_factor_of_all_gradients_is_said():
    found = compare(np.ones(3) * 2, np.ones(3) * 2)
    assert found.text == "every gradient is 2 times that of one rank"
    assert "not divided by their number" in found.hint


def test_missing_samples_are_counted():
    found = compare(np.ones(3), np.ones(3) * 2, samples=((1,), (3,)))
    assert found.text == "1 of 2 samples of one rank are missing, 1 others are there"


def test_samples_that_change_no_gradient_raise_no_alarm():
    assert compare(np.ones(3), np.ones(3), samples=((1,), (2, 3))) is None


def parts_of(*arrays) -> dict:
    return {"x": [part_of(np.asarray(array)) for array in arrays]}


X = np.random.default_rng(0).standard_normal((4, 8, 6, 2))
CUTS = {
    "samples": [X[:2], X[2:]], "every second sample": [X[::2], X[1::2]],
    "sequences": [X[:, :4], X[:, 4:]], "zigzag": [X[:, [0, 1, 6, 7]], X[:, 2:6]],
    "last": [X[..., :1], X[..., 1:]], "copies": [X, X],
    "mesh": [X[:2, :4], X[:2, 4:], X[2:, :4], X[2:, 4:]],
    "micro-batches": [X[:1], X[1:2], X[2:3], X[3:]],
    "rounded": [X[:2].astype(np.float32), X[2:].astype(np.float32)],
    "flat": [X.reshape(-1, 2)[:96], X.reshape(-1, 2)[96:]],
}  # fmt: skip


@pytest.mark.parametrize("cut", CUTS)
def test_samples_are_the_same_however_they_are_cut(cut):
    parts = CUTS[cut]
    assert difference(parts_of(*parts), parts_of(X), len(parts)) is None


@pytest.mark.parametrize(
    "parts, text",
    [
        ([X[:2], X[:2]], "all ranks were given the same 2 samples"),
        ([X[:, :4], X[:, :4]], "all ranks were given the same 4 slices along dim"),
        ([X[:, :4], X[:, 3:7]], "1 of 8 slices along dimension 1 of one rank are"),
        ([X[:2], X[1:3]], "1 of 4 samples of one rank are missing"),
        ([X, X[:1]], "1 samples more than on one rank"),
    ],
)
def test_samples_that_are_missing_are_counted_along_the_cut(parts, text):
    found = difference(parts_of(*parts), parts_of(X), len(parts))
    assert found.certain and found.text.startswith(text), found.text


def test_the_input_that_differs_is_named():
    ids, places = np.arange(16).reshape(2, 8), np.tile(np.arange(8) + 100, (2, 1))
    one = {"ids": [part_of(ids)], "places": [part_of(places)]}
    many = {
        "ids": [part_of(ids[:, :4]), part_of(ids[:, 4:])],
        "places": [part_of(places[:, :4])] * 2,  # begin again on each rank
    }
    text = "all ranks were given the same 4 slices along dimension 1, in places"
    assert difference(many, one, 2).text == text


def test_samples_padded_to_each_ranks_length_cannot_be_aligned():
    many = parts_of(X[:2, :5], X[2:, :7])
    found = difference(many, parts_of(X), 2)
    assert not found.certain
    assert found.text == (
        "x has the shapes (2, 5, 6, 2), (2, 7, 6, 2), on one rank "
        "the shape (4, 8, 6, 2)"
    )


def test_masks_and_numbers_of_a_batch_are_no_samples():
    def given(x, mask, lengths):
        return {
            "ids": [part_of(x)],
            "mask": [part_of(mask)],
            "lengths": [part_of(np.array(lengths))],
        }

    mask = np.tril(np.ones((64, 64), bool))
    one = given(X, mask, [0, 3, 7, 9])
    many = given(X[:2], mask[:32], [0, 3, 7, 1])
    for name, parts in given(X[2:], mask[:32], [0, 1, 4, 8]).items():
        many[name] += parts
    assert difference(many, one, 2) is None


def test_tensors_are_found_in_what_is_like_a_dictionary():
    batch = UserDict(ids=torch.ones(2), more=[torch.zeros(1), "text"])
    names = [name for name, _ in tensors_in((batch,), "input")]
    assert names == ["input.0.ids", "input.0.more.0"]


def test_slices_are_put_together_along_the_cut():
    whole = np.arange(12.0).reshape(3, 4)
    records = [RankRecord(r, [Step(before={"w": whole[:, 2 * r : 2 * r + 2]})])
               for r in (0, 1)]  # fmt: skip
    (step,) = combine(records, {"w": whole})
    np.testing.assert_array_equal(step.arrays["before"]["w"], whole)


def test_slices_that_lie_in_another_order_are_put_back():
    whole = np.arange(24.0).reshape(6, 4)
    mine = [0, 2, 4], [1, 3, 5]  # of queries, keys and values, two rows each
    steps = [Step(before={"w": whole[its]}, raw={"w": -whole[its]}) for its in mine]
    records = [RankRecord(rank, [step]) for rank, step in enumerate(steps)]
    (step,) = combine(records, {"w": whole})
    np.testing.assert_array_equal(step.arrays["before"]["w"], whole)
    np.testing.assert_array_equal(step.arrays["raw"]["w"], -whole)


@pytest.mark.parametrize("copies", [1, 2])
def test_outputs_of_parts_and_of_copies_add_up(copies):
    values = np.arange(8.0)
    parts = [Moments() for _ in range(2 * copies)]
    for number, part in enumerate(parts):
        part.add(np.split(values, 2)[number % 2])
    whole = Moments()
    whole.add(values)
    assert whole.distance(together(parts, 8)) == 0


def test_outputs_that_do_not_add_up_say_nothing():
    part = Moments()
    part.add(np.ones(3))
    assert together([part, part], 8) is None


def dropping(rank: int, dropped: int, on: float, sample: int, elements: int):
    """A rank that drops elements of activations with the mean `on`."""
    moments = Moments()
    moments.add(np.full(elements, on))
    mask = Mask("", (elements,), moments, dropped, chance=0.82**elements)
    return RankRecord(rank, [Step(inputs=parts_of([sample]), masks=[mask])])


@pytest.mark.parametrize(
    "other, text",
    [
        ({"dropped": 1, "on": 2.0, "sample": 2}, "the same elements of different"),
        ({"dropped": 2, "on": 1.0, "sample": 1}, "different elements of the same"),
        ({"dropped": 2, "on": 1.0, "sample": 2}, None),  # positions, as all have them
        ({"dropped": 2, "on": 2.0, "sample": 2}, None),
        ({"dropped": 1, "on": 1.0, "sample": 1}, None),
    ],
)
def test_dropout_of_two_ranks(other, text):
    first = dropping(0, dropped=1, on=1.0, sample=1, elements=512)
    found = [f.text for f in look([first, dropping(1, elements=512, **other)])]
    assert [text in one for one in found] == [True] * (text is not None), found


def test_few_elements_may_be_dropped_alike_by_chance():
    ranks = [dropping(r, dropped=1, on=r + 1.0, sample=r, elements=8) for r in (0, 1)]
    assert list(look(ranks)) == []


@pytest.mark.parametrize("later, stages", [(1.0, ["optimizer"]), (2.0, [])])
def test_what_no_optimizer_has_may_be_updated_in_another_way(later, stages):
    step = Step(before={"w": np.ones(3)}, later={"w": np.full(3, later)})
    step.without_optimizer = ["w"]
    assert [found.stage for found in look([RankRecord(0, [step])])] == stages


@pytest.mark.parametrize("sent, stages", [(True, []), (False, ["update"])])
def test_updates_may_be_sent_after_the_optimizers_step(sent, stages):
    def run(*afters):
        records = [step_of(np.ones(3), [1, 2]) for _ in afters]
        for record, after in zip(records, afters, strict=True):
            (step,) = record.steps
            step.after = {"w": after}
            step.later = {"w": np.zeros(3) if sent else after}
        return combine(records, {"w": np.ones(3)})

    one, noisy = run(np.zeros(3)), run(np.zeros(3))
    many = run(np.array([0.0, 0.0, 1.0]), np.array([1.0, 1.0, 0.0]))
    found = first_difference(2, many, one, Allowed(one, [noisy]))
    assert [f.stage for f in [found] if f] == stages


@pytest.mark.parametrize(
    "of_ranks, stages", [((3, 5), []), ((8, 8), []), ((9, 8), ["buffer"])]
)
def test_a_buffer_may_count_what_its_rank_has_seen(of_ranks, stages):
    """Eight tokens a step: of all ranks, or of each."""

    def run(*seen):
        steps = [[step_of(np.ones(3), [1, 2]).steps[0] for _ in seen] for _ in "ab"]
        for number, of_all in enumerate(steps, 1):
            for step, tokens in zip(of_all, seen, strict=True):
                step.buffers = {"seen": np.array([tokens * float(number)])}
        records = [
            RankRecord(r, list(its)) for r, its in enumerate(zip(*steps, strict=True))
        ]
        return combine(records, {"w": np.ones(3)})

    one, noisy = run(8), run(8)
    found = first_difference(2, run(*of_ranks), one, Allowed(one, [noisy]))
    assert [f.stage for f in [found] if f] == stages


def test_values_of_nested_and_sparse_tensors_are_read():
    nested = torch.nested.nested_tensor(
        [torch.ones(2), torch.ones(3)], layout=torch.jagged
    )
    assert _host(_local(nested)).tolist() == [1.0] * 5
    assert _host(torch.eye(2).to_sparse()).tolist() == [[1, 0], [0, 1]]


def test_wrappers_do_not_change_names():
    inner = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    names = Names()
    names.add(nn.DataParallel(inner))
    assert list(names.parameters()) == ["0.weight", "0.bias"]
    assert names.of_module(inner[1]) == "1"


def test_a_tie_that_is_cut_is_seen():
    model = nn.ModuleDict({"words": nn.Embedding(3, 2), "head": nn.Linear(2, 3)})
    ties, names = Ties(), Names()
    names.add(model)
    shared = model["words"].weight
    for key in ("words", "head"):
        model[key].weight = shared
        ties.add(model[key], "weight", shared)
    assert ties.broken(names) is None
    model["head"].weight = nn.Parameter(shared.detach().clone())
    assert ties.broken(names) == ("words.weight", "head.weight")


def test_noise_is_as_large_as_rounding():
    torch.manual_seed(0)
    x, w = torch.randn(64, 256), torch.randn(256, 64)
    exact = x.double() @ w.double()
    with Rounding(seed=1):
        nudged = x @ w
    error = (nudged - exact).norm() / exact.norm()
    unit = torch.finfo(torch.float32).eps / 2
    assert unit < error < 3 * unit * 16  # 16 is the root of 256 terms


def test_noise_reaches_gradients():
    weight = torch.ones(8, 8, requires_grad=True)
    x = torch.arange(64.0).reshape(8, 8)
    (x @ weight).sum().backward()
    exact, weight.grad = weight.grad, None
    with Rounding(seed=1):
        (x @ weight).sum().backward()
    assert 0 < (weight.grad - exact).norm() < 1e-4 * exact.norm()


def test_what_the_recorder_replaces_is_called_as_it_was():
    class Noting(Recorder):
        pairs = []

        def _replace(self, where, name, ours):
            old = getattr(where, name)
            super()._replace(where, name, ours)
            self.pairs.append((getattr(where, name), old))

    with Noting(1):
        assert nn.functional.scaled_dot_product_attention in dict(Noting.pairs)
    for new, old in Noting.pairs:
        for name in ("__name__", "__qualname__", "__module__", "__doc__"):
            assert getattr(new, name) == getattr(old, name), (new, old)

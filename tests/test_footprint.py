"""``import shardtensor`` changes nothing for programs without ShardTensors, and what it replaces is in one list."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from shardtensor._compat.replaced import AT_COMMUNICATION, AT_FIRST, AT_IMPORT, REPLACED, find, replace

HERE = Path(__file__).resolve().parent


def seen_at(name):
    """The name by which a snapshot has it: of a class, that of the module that defines it."""
    owner, attribute = find(name) if name.partition(":")[0] in sys.modules else (None, "")
    return f"{owner.__module__}:{owner.__qualname__}.{attribute}" if isinstance(owner, type) else name


NAMES = {seen_at(name): entry.when for entry in REPLACED for name in entry.names}
# Where torch's function is replaced, plain calls enter one function of the package.
PATCHED = ["PatchedFunction._self_call"]
AT_MOST = {
    "conv2d": PATCHED,
    "linear": PATCHED,
    "step of a module": 2 * PATCHED,
    "step of DDP": 2 * PATCHED,
    "step of FSDP2": PATCHED,
}


@pytest.fixture(scope="module")
def noticed():
    script = [sys.executable, str(HERE / "footprint.py")]
    done = subprocess.run(script, check=True, timeout=300, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def test_what_is_replaced_is_in_the_list(noticed):
    for stage, when in (("import", AT_IMPORT), ("the first", AT_FIRST), ("communication", AT_COMMUNICATION)):
        names = set(noticed[f"with {stage}"]) - ({"atexit:register"} if when == AT_COMMUNICATION else set())
        assert names
        assert {name: NAMES.get(name) for name in names} == dict.fromkeys(names, when)


def test_the_list_has_no_more(noticed):
    """But for what other versions of torch, libraries and the compiler have, and what this snapshot does not see."""
    others = {name for name in NAMES if name.startswith(("natten", "opt_einsum", "torch._dynamo", "torch._inductor"))}
    others |= {"torch.autograd.function:Function.apply", "torch.autograd.function:_SingleLevelFunction.apply"}
    others |= {"torch._library.simple_registry:GenericTorchDispatchRuleHolder.find", "os:register_at_fork"}
    others |= {"std:set_terminate", "sys:excepthook", "warnings:filters"}
    others |= {"torch.ops:c10d", "torch._C:_stash_obj_in_tls"}
    assert NAMES.keys() - others <= {*noticed["with import"], *noticed["with the first"]}


def test_nothing_is_replaced_that_is_not_in_the_list():
    with pytest.raises(KeyError):
        replace("torch:add", lambda add: add)


def test_a_first_one_that_comes_too_late_is_refused(noticed):
    """C++ has called what is replaced then; where it is called without gradients, in inference mode, all is well."""
    for text in noticed["too late"]:
        assert text.startswith("the first ShardTensor of a process is made in the forward of an autograd.Function")


def test_states_are_as_they_were(noticed):
    assert noticed["after"] == noticed["before"]


@pytest.mark.parametrize("where", ["alone", "in a group"])
def test_functions_that_plain_calls_enter(noticed, where):
    assert noticed[where] == {name: AT_MOST.get(name, []) for name in noticed[where]}
    assert len(noticed[where]) >= 12


def test_functions_that_plain_calls_enter_next_to_shard_tensors(noticed):
    """Function.apply is replaced then; the transforms look at their arguments, and keep the states of generators."""
    print(noticed["times"])  # in microseconds: without this package, with it, next to ShardTensors
    # Until 2.12 each operator on DTensors looks for a rule, by a function that is replaced with one of ours.
    rule = "claim_dispatch.<locals>.claiming.<locals>.<lambda>"
    found = {k: [name for name in names if name != rule] for k, names in noticed["next to ShardTensors"].items()}
    transforms = {"vmap", "grad", "jvp", "jacrev"}
    one = {"autograd.Function": ["wrap_functions.<locals>.apply"], **AT_MOST}
    others = {name: names for name, names in found.items() if name not in transforms}
    assert others == {name: one.get(name, []) for name in others}
    assert all(0 < len(found[name]) < 30 for name in transforms)


def test_the_page_has_the_list():
    rows = [
        f"| {', '.join(f'`{name}`'.replace(':', '.') for name in entry.names)} | {entry.when} | {entry.why} | "
        f"{entry.otherwise} |"
        for entry in REPLACED
    ]
    page = (HERE.parent / "docs" / "how-it-works.md").read_text()
    assert "\n".join(rows) in page, "\n".join(rows)

"""Timing by name: how targets are written, and what becomes of them when their modules are imported."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import itertools
import logging
import pickle
import sys
import textwrap

import pytest

from gpu_timed import ConfigurationError, current, gpu_timed, testing
from gpu_timed.settings import from_environment
from gpu_timed.target_names import parse_targets
from gpu_timed.targets import apply_targets, target_states
from gpu_timed.testing import capture

SOURCE = """
    import functools
    from gpu_timed import gpu_timed

    def infer(x=1):
        "Documented."
        return x + 1

    async def serve(x=1):
        return infer(x)

    def tokens():
        yield 1

    class Base:
        def inherited(self):
            return "inherited"

    class Model(Base):
        def forward(self, x):
            return self, x

        @staticmethod
        def static(x):
            return x

        @classmethod
        def make(cls, x=1):
            return cls, x

        @property
        def shape(self):
            return 3

        class Inner:
            def step(self):
                return "step"

    class Callable:
        def __call__(self, x):
            return x

    class Nothing:
        pass

    class Closed(type):
        def __setattr__(self, name, value):
            raise TypeError("closed")

    class Shut(metaclass=Closed):
        def run(self):
            return 1

    @gpu_timed
    def decorated():
        return 1

    part = functools.partial(infer, 4)
    timed_part = gpu_timed(functools.partial(infer, 5))
    model = Model()
    number = 5
"""
_numbers = itertools.count()


@pytest.fixture
def module(tmp_path, monkeypatch):
    """The name of a module that can be imported and was not yet."""
    name = f"target_module_{next(_numbers)}"
    (tmp_path / f"{name}.py").write_text(textwrap.dedent(SOURCE))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield name
    sys.modules.pop(name, None)


def calls(action):
    """What *action* returned, and the names of the spans that it made."""
    with capture() as records:
        answer = action()
    return answer, [record.name for record in records]


def statuses(applied):
    return [state.status for state in applied.states]


# -- how they are written ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        (" , ,\n", []),
        ("pkg.mod:infer", [("pkg.mod", ("infer",), {})]),
        (" pkg.mod : Model.forward ", [("pkg.mod", ("Model", "forward"), {})]),
        (
            "a:f[sync=deferred,every=10,name=decode step],b:g[]",
            [("a", ("f",), {"sync": "deferred", "every": 10, "name": "decode step"}), ("b", ("g",), {})],
        ),
        (
            "a:f [ late = device_only , mode=eager, attributes.model=llama 7b,attributes.name=n,name=m ]\nb:g",
            [
                (
                    "a",
                    ("f",),
                    {
                        "late": "device_only",
                        "mode": "eager",
                        "name": "m",
                        "attributes": {"model": "llama 7b", "name": "n"},
                    },
                ),
                ("b", ("g",), {}),
            ],
        ),
        ("__main__:f", [("__main__", ("f",), {})]),
    ],
)
def test_targets_are_read(text, expected):
    """Modules, names and options, with blanks and line ends where they do no harm."""
    assert [(target.module, target.path, dict(target.options)) for target in parse_targets(text)] == expected


@pytest.mark.parametrize(
    ("text", "part", "says"),
    [
        ("pkg.mod.infer", "'pkg.mod.infer'", "did you mean 'pkg.mod:infer'?"),
        ("infer", "'infer'", "did you mean 'module:infer'?"),
        ("app.py:infer", "'app.py'", "name the module as it is imported, or __main__"),
        ("src/app:infer", "'src/app'", "is a file"),
        ("pkg-mod:infer", "'pkg-mod'", "not the name of a module"),
        (":infer", "''", "not the name of a module"),
        ("pkg.mod:", "''", "not the name of a function or method"),
        ("pkg:a b", "'a b'", "not the name of a function or method"),
        ("pkg:f:g", "'f:g'", "not the name of a function"),
        ("pkg:f[sync=deferred", "'pkg:f[sync=deferred'", "its [ has no ]"),
        ("pkg:f[sync=deferred] pkg:g", "'pkg:g'", "a comma goes between two targets"),
        ("pkg:f[deferred]", "'deferred'", "write option=value"),
        ("pkg:f[sync=]", "'sync='", "write option=value"),
        ("pkg:f[snyc=deferred]", "'snyc'", "did you mean 'sync'?"),
        ("pkg:f[attribute.a=b]", "'attribute.a'", "did you mean 'attributes.KEY'?"),
        ("pkg:f[zzz=1]", "'zzz'", "Use one of: 'attributes.KEY', 'every', 'late', 'mode', 'name', 'sync'"),
        ("pkg:f[sync=defered]", "'defered'", "did you mean 'deferred'?"),
        ("pkg:f[late=hots]", "'hots'", "did you mean 'host'?"),
        ("pkg:f[mode=eagre]", "'eagre'", "did you mean 'eager'?"),
        ("pkg:f[every=ten]", "every=ten", "every=10 records one call in ten"),
        ("pkg:f[every=0]", "not 0", "every=10 records one call in ten"),
        ("pkg:f[work=1e9]", "'1e9'", "a function of the call's arguments that returns one, or 'count'"),
        ("pkg:f[every=2,every=3]", "'every'", "given twice"),
        ("pkg:f[name=a[0]]", "'name=a[0]'", "bracket"),
        ("pkg:f,pkg:g,pkg:f[every=2]", "'pkg:f'", "named twice"),
    ],
)
def test_what_cannot_be_read_is_named_with_its_fix(text, part, says):
    """Each mistake names the bad part and what to write instead."""
    with pytest.raises(ConfigurationError) as caught:
        parse_targets(text)
    assert part in str(caught.value)
    assert says in str(caught.value)
    assert str(caught.value).startswith("target ")


def test_the_options_are_those_of_the_decorator():
    """Every option of gpu_timed that can be written as a word is an option of a target."""
    from gpu_timed import target_names

    options = {name for name in inspect.signature(gpu_timed).parameters if name != "function"}
    assert options == {*target_names._OPTIONS, "attributes"}


def test_the_variable_is_named_when_it_cannot_be_read(monkeypatch):
    """A mistake in the environment says which variable it is in."""
    monkeypatch.setenv("GPU_TIMED_TARGETS", "pkg:f[snyc=x]")
    with pytest.raises(ConfigurationError, match=r"GPU_TIMED_TARGETS='pkg:f\[snyc=x\]' cannot be used: target"):
        apply_targets()


def test_the_variable_is_known(caplog):
    """It is no unknown setting, and a misspelt one is told."""
    from_environment({"GPU_TIMED_TARGETS": "a:b"})
    assert caplog.text == ""
    from_environment({"GPU_TIMED_TARGET": "a:b"})
    assert "did you mean GPU_TIMED_TARGETS?" in caplog.text


# -- what becomes of them ---------------------------------------------------------------------------------


def test_a_target_waits_for_its_module_and_imports_nothing(module, device, monkeypatch):
    """Applied by the variable: nothing is imported; the import by the program finds it timed, also by ``from``."""
    monkeypatch.setenv("GPU_TIMED_TARGETS", f"{module}:infer[name=decode,every=2]")
    applied = apply_targets()
    assert module not in sys.modules
    assert [(s.target, s.status, s.detail) for s in target_states()] == [
        (f"{module}:infer", "waiting", f"waiting for {module}")
    ]
    exec(f"from {module} import infer", scope := {})
    assert calls(lambda: [scope["infer"](x) for x in range(3)]) == ([1, 2, 3], ["decode", "decode"])
    assert statuses(applied) == ["timed"]
    assert scope["infer"].__doc__ == "Documented."


def test_a_module_that_is_there_already_is_timed_at_once(module, device):
    """What was imported before is replaced in its module; a name bound to the bare function before stays bare."""
    found = importlib.import_module(module)
    bare = found.infer
    applied = apply_targets([f"{module}:infer"])
    assert statuses(applied) == ["timed"]
    assert calls(found.infer) == (2, ["infer"])
    assert calls(bare) == (2, [])
    assert found.infer.__wrapped__ is bare
    assert pickle.loads(pickle.dumps(found.infer)) is found.infer


@pytest.mark.parametrize(
    ("path", "use", "name"),
    [
        ("infer", lambda m: m.infer(1) == 2, "infer"),
        ("serve", lambda m: asyncio.run(m.serve(1)) == 2, "serve"),
        ("tokens", lambda m: list(m.tokens()) == [1], "tokens"),
        ("Model.forward", lambda m: m.model.forward(1) == (m.model, 1), "Model.forward"),
        ("Model.static", lambda m: m.Model.static(1) == m.model.static(1) == 1, "Model.static"),
        ("Model.make", lambda m: m.Model.make(1) == m.model.make(1) == (m.Model, 1), "Model.make"),
        ("Model.inherited", lambda m: m.model.inherited() == "inherited", "Base.inherited"),
        ("Model.Inner.step", lambda m: m.Model.Inner().step() == "step", "Model.Inner.step"),
        ("Callable", lambda m: m.Callable()(3) == 3, "Callable"),
        ("part", lambda m: m.part() == 5, "infer"),
    ],
)
def test_each_kind_is_timed_and_put_back(module, path, use, name, device):
    """The thing works, makes spans of its name, keeps its kind, and undo() leaves exactly what was there."""
    found = importlib.import_module(module)
    kinds = {key: dict(vars(held)) for key, held in vars(found).items() if isinstance(held, type)}
    before = dict(vars(found)), {**kinds, "Inner": dict(vars(found.Model.Inner))}
    applied = apply_targets(f"{module}:{path}")
    assert statuses(applied) == ["timed"], applied.states
    answer, names = calls(lambda: use(found))
    assert answer
    assert set(names) == {name}
    if path in ("Model.static", "Model.make"):
        assert type(vars(found.Model)[path.partition(".")[2]]) is type(before[1]["Model"][path.partition(".")[2]])
    applied.undo()
    after = {key: dict(vars(held)) for key, held in vars(found).items() if isinstance(held, type)}
    assert (dict(vars(found)), {**after, "Inner": dict(vars(found.Model.Inner))}) == before
    assert calls(lambda: use(found)) == (True, [])
    assert statuses(applied) == ["undone"]


def test_a_subclass_gets_its_own_and_leaves_the_base_alone(module, device):
    """An inherited method is timed for the class that was named, and not for its base."""
    apply_targets(f"{module}:Model.inherited")
    found = importlib.import_module(module)
    assert calls(found.Base().inherited) == ("inherited", [])
    assert calls(found.Model().inherited) == ("inherited", ["Base.inherited"])


def test_undo_leaves_what_somebody_else_put_there(module):
    """What was replaced again since is not ours to take away."""
    found = importlib.import_module(module)
    applied = apply_targets([f"{module}:infer", f"{module}:Model.static"])
    theirs = found.infer = lambda: "theirs"
    applied.undo()
    assert found.infer is theirs
    assert calls(lambda: found.Model.static(1)) == (1, [])


def test_undo_while_waiting_ends_the_waiting(module):
    """A module that is imported after undo() is left alone."""
    applied = apply_targets(f"{module}:infer")
    applied.undo()
    found = importlib.import_module(module)
    assert not hasattr(found.infer, "__wrapped__")
    assert statuses(applied) == ["undone"]


@pytest.mark.parametrize(
    ("path", "status", "says"),
    [
        ("infre", "missing", "has no 'infre'; did you mean 'infer'?"),
        ("Modle.forward", "missing", "has no 'Modle'; did you mean 'Model' or 'model'?"),
        ("Model.fordward", "missing", "Model has no 'fordward'; did you mean 'forward'?"),
        ("Model.inherit", "missing", "did you mean 'inherited'?"),
        ("zzz", "missing", "has no 'zzz'."),
        ("number", "refused", "can only decorate something that can be called, not int 5"),
        ("model.forward", "refused", "model is not a class but Model"),
        ("infer.inner", "refused", "infer is not a class but function"),
        ("Model.shape", "refused", "put @property above @gpu_timed"),
        ("Nothing", "refused", "it has no __call__ of its own"),
        ("Shut.run", "refused", "cannot be replaced (TypeError: closed)"),
        ("serve[sync=device]", "refused", "use 'boundary' or 'deferred'"),
        ("decorated", "timed_already", "by a decorator or another target already"),
        ("timed_part", "timed_already", "by a decorator or another target already"),
    ],
)
def test_what_cannot_be_timed_is_said_once_and_breaks_no_import(path, status, says, module, caplog):
    """The import goes on, the log says once which target it was and why, and the state says it again."""
    applied = apply_targets(f"{module}:{path}")
    found = importlib.import_module(module)
    assert found.infer(1) == 2
    (state,) = applied.states
    assert state.status == status
    assert says in state.detail
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert f"gpu_timed: target {module}:{path.partition('[')[0]}: " in caplog.text
    assert says in caplog.text
    assert current.ledger().snapshot() == {f"target_{status}": 1}
    importlib.import_module(module)
    assert target_states() == applied.states
    assert len(caplog.records) == 1


def test_a_bad_target_costs_the_others_nothing(module, device):
    """Of three targets in one module, two of them good, two are timed."""
    applied = apply_targets(f"{module}:infer,{module}:nothing,{module}:Model.forward")
    found = importlib.import_module(module)
    assert statuses(applied) == ["timed", "missing", "timed"]
    assert calls(lambda: found.model.forward(found.infer(1)))[1] == ["infer", "Model.forward"]


def test_a_second_target_for_the_same_thing_is_told(module, device):
    """Applied twice, a function is timed once, and each undo() takes back what it did."""
    first, second = (apply_targets(f"{module}:infer") for _ in range(2))
    found = importlib.import_module(module)
    assert calls(found.infer) == (2, ["infer"])
    assert [state.status for state in target_states()] == ["timed", "timed_already"]
    second.undo()
    assert calls(found.infer) == (2, ["infer"])
    first.undo()
    assert calls(found.infer) == (2, [])


def test_disabled_nothing_is_replaced(module, monkeypatch):
    """Under GPU_TIMED_DISABLED=1 the module is as it was written, and the state says why."""
    monkeypatch.setenv("GPU_TIMED_DISABLED", "1")
    applied = apply_targets(f"{module}:infer,{module}:Model.static,{module}:Callable")
    found = importlib.import_module(module)
    assert statuses(applied) == ["disabled"] * 3
    assert not hasattr(found.infer, "__wrapped__")
    assert not hasattr(vars(found.Model)["static"].__func__, "__wrapped__")


def test_a_module_that_fails_to_import_raises_its_own_error(module, tmp_path):
    """The error of the module's own code comes out; a later import that succeeds is timed."""
    path = tmp_path / f"{module}.py"
    good = path.read_text()
    path.write_text("raise KeyError('mine')")
    applied = apply_targets(f"{module}:infer")
    with pytest.raises(KeyError, match="mine"):
        importlib.import_module(module)
    assert statuses(applied) == ["waiting"]
    path.write_text(good + "\n# longer than it was, so that no cached bytecode is taken for it\n")
    importlib.invalidate_caches()
    importlib.import_module(module)
    assert statuses(applied) == ["timed"]


def test_a_lazy_name_is_not_loaded_for_us(tmp_path, monkeypatch):
    """A module's own __getattr__ is not called: the message says to name where it is defined."""
    (tmp_path / "lazy_target.py").write_text("def __getattr__(name):\n    raise SystemExit(name)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    applied = apply_targets("lazy_target:Model.forward")
    importlib.import_module("lazy_target")
    assert "name the module that defines it" in applied.states[0].detail
    sys.modules.pop("lazy_target")


def test_a_script_that_runs_already_is_told_the_way(monkeypatch):
    """A function of __main__ that is not there is not waited for: only ``gpu-timed run`` can have it."""
    applied = apply_targets("__main__:nothing_like_this")
    assert applied.states[0].status == "missing"
    assert "gpu-timed run --target" in applied.states[0].detail


def test_reset_forgets_targets(module):
    """Between tests nothing waits."""
    apply_targets(f"{module}:infer")
    testing.reset()
    assert target_states() == ()
    assert not hasattr(importlib.import_module(module).infer, "__wrapped__")


def test_a_timed_model_is_known_as_such(tmp_path, monkeypatch, device):
    """A module of torch is timed once by name, its class by its forward, and what is timed already is left."""
    pytest.importorskip("torch")
    name = f"target_torch_{next(_numbers)}"
    (tmp_path / f"{name}.py").write_text(
        "import torch\nfrom gpu_timed import gpu_timed\n"
        "class Net(torch.nn.Module):\n    def forward(self, x):\n        return x + 1\n"
        "net = torch.nn.ReLU()\ntimed = gpu_timed(torch.nn.ReLU())\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    applied = apply_targets(f"{name}:Net,{name}:net,{name}:timed")
    found = importlib.import_module(name)
    import torch

    x = torch.zeros(2)
    assert statuses(applied) == ["timed", "timed", "timed_already"]
    assert calls(lambda: (found.Net()(x), found.net(x)))[1] == ["Net", "ReLU"]
    applied.undo()
    assert calls(lambda: (found.Net()(x), found.net(x)))[1] == []
    assert type(found.net) is torch.nn.ReLU
    sys.modules.pop(name)
